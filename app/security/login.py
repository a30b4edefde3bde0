"""Who the browser is: a random token in a cookie, known to the database as a hash only."""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from typing import Any, cast

from litestar.connection import ASGIConnection
from litestar.exceptions import PermissionDeniedException
from litestar.types import Scope

from app.security.agent import agent_in_words
from app.security.scope import (
    cookie_values,
    header_values,
    own_cookie,
    request_security,
    set_cookie_value,
)
from sessions.account_records import NewLogin
from sessions.records import User
from sessions.repository import Repository

LOGIN_COOKIE = "rejoinder_login"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)  # 32 bytes in URL-safe base 64
_MAX_AGE_S = 400 * 24 * 3600  # the most that browsers keep

_Connection = ASGIConnection[Any, Any, Any, Any]


def hash_token(token: str) -> str:
    """Return what the database keeps of a token: SHA-256 in hex. It is random, so unsalted."""
    return sha256(token.encode()).hexdigest()


def login_tokens(scope: Scope) -> list[str]:
    """Return the request's well-formed login tokens, one just issued first."""
    issued = request_security(scope).login_token
    if issued is not None:
        return [issued] if issued else []
    values = cookie_values(scope, own_cookie(scope, LOGIN_COOKIE))
    return [value for value in values if _TOKEN.fullmatch(value)]


def login_digest(scope: Scope) -> bytes:
    """Return what a CSRF token is bound to; empty for a browser without login."""
    tokens = login_tokens(scope)
    return hash_token(tokens[0]).encode() if tokens else b""


async def current_user(request: _Connection) -> User | None:
    """Return the user whom the login cookie names, None for a browser not known yet.

    Where accounts are required a guest is nobody.
    """
    record = request_security(request.scope)
    if not record.user_known:
        repository: Repository = request.app.state.repository
        required: bool = request.app.state.accounts_required
        for token in login_tokens(request.scope):
            found = await repository.user_by_token(hash_token(token))
            if found is not None and not (required and found.is_guest):
                record.user, record.login_hash = found, hash_token(token)
                break
        record.user_known = True
    return cast("User | None", record.user)


def known_user(scope: Scope) -> User | None:
    """Return the user whom this request has looked up, None when it has not or there is none."""
    return cast("User | None", request_security(scope).user)


def login_hash(scope: Scope) -> str | None:
    """Return the hash of the login by which this request's user was found."""
    return request_security(scope).login_hash


async def login_behind(request: _Connection) -> str | None:
    """Return the hash of the browser's valid login, a guest's included; None without one."""
    repository: Repository = request.app.state.repository
    for token in login_tokens(request.scope):
        if await repository.user_by_token(hash_token(token)) is not None:
            return hash_token(token)
    return None


async def ensure_user(request: _Connection) -> User:
    """Return the current user; a browser not known yet becomes a guest and is signed in.

    For handlers of unsafe methods only: reading a page makes no user. Where accounts are required
    such a browser does not come here.
    """
    found = await current_user(request)
    if found is not None:
        return found
    if request.app.state.accounts_required:
        raise PermissionDeniedException("This needs an account.")
    return await sign_in(request)


async def sign_in(request: _Connection) -> User:
    """Make a guest and sign the browser in."""
    repository: Repository = request.app.state.repository
    token = new_token()
    user = await repository.create_user(hash_token(token), new_login(request.scope, token).agent)
    set_login(request, user, token)
    return user


def new_token() -> str:
    """Return a random token, for a login or a link."""
    return secrets.token_urlsafe(32)


def new_login(scope: Scope, token: str) -> NewLogin:
    """Return what the database is to keep of a login from this request's browser."""
    agent = next(iter(header_values(scope, b"user-agent")), "")
    return NewLogin(token_hash=hash_token(token), agent=agent_in_words(agent))


def set_login(request: _Connection, user: User, token: str) -> None:
    """Give the browser a login that the database knows, and a CSRF token bound to it.

    Both cookies are set on this request's response, which must not have started.
    """
    record = request_security(request.scope)
    record.user, record.user_known = user, True
    record.login_token, record.login_hash = token, hash_token(token)
    _set_cookie(request, token, _MAX_AGE_S)


def clear_login(request: _Connection) -> None:
    """Take the browser's login away; its CSRF token is then nobody's."""
    record = request_security(request.scope)
    record.user, record.user_known = None, True
    record.login_token, record.login_hash = "", None
    _set_cookie(request, "", 0)


def _set_cookie(request: _Connection, token: str, max_age_s: int) -> None:
    secure: bool = request.app.state.secure_cookies
    name = own_cookie(request.scope, LOGIN_COOKIE)
    request_security(request.scope).cookies[LOGIN_COOKIE] = set_cookie_value(
        name, token, secure=secure, http_only=True, max_age_s=max_age_s
    )
    request.app.state.csrf_signer.issue(request.scope)

"""Who the browser is: a random token in a cookie, known to the database as a hash only."""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from typing import Any, cast

from litestar.connection import ASGIConnection
from litestar.types import Scope

from app.security.scope import cookie_values, request_security, set_cookie_value
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
        return [issued]
    return [value for value in cookie_values(scope, LOGIN_COOKIE) if _TOKEN.fullmatch(value)]


def login_digest(scope: Scope) -> bytes:
    """Return what a CSRF token is bound to; empty for a browser without login."""
    tokens = login_tokens(scope)
    return hash_token(tokens[0]).encode() if tokens else b""


async def current_user(request: _Connection) -> User | None:
    """Return the user whom the login cookie names, None for a browser not known yet."""
    record = request_security(request.scope)
    if not record.user_known:
        repository: Repository = request.app.state.repository
        for token in login_tokens(request.scope):
            record.user = await repository.user_by_token(hash_token(token))
            if record.user is not None:
                break
        record.user_known = True
    return cast("User | None", record.user)


async def ensure_user(request: _Connection) -> User:
    """Return the current user; a browser not known yet becomes one and is signed in.

    For handlers of unsafe methods only: reading a page makes no user.
    """
    return await current_user(request) or await sign_in(request)


async def sign_in(request: _Connection) -> User:
    """Make a user and sign the browser in: a new login token, and a CSRF token bound to it.

    Both cookies are set on this request's response, which must not have started.
    """
    repository: Repository = request.app.state.repository
    token = secrets.token_urlsafe(32)
    user = await repository.create_user(hash_token(token))
    record = request_security(request.scope)
    record.user, record.user_known, record.login_token = user, True, token
    secure: bool = request.app.state.secure_cookies
    record.cookies[LOGIN_COOKIE] = set_cookie_value(
        LOGIN_COOKIE, token, secure=secure, http_only=True, max_age_s=_MAX_AGE_S
    )
    request.app.state.csrf_signer.issue(request.scope)
    return user

"""Proof that a form came from one of our pages: a signed token, bound to the login.

The token is in a cookie that scripts of our pages may read, and each unsafe request repeats it
in the header `x-csrftoken` or the form field `_csrf_token`. Another site can neither read nor
forge it, and a token of another login does not fit.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from typing import Any, Protocol

from litestar.connection import ASGIConnection
from litestar.types import Scope

from app.security.login import login_digest
from app.security.scope import cookie_values, own_cookie, request_security, set_cookie_value

CSRF_COOKIE = "rejoinder_csrf"
CSRF_FIELD = "_csrf_token"
CSRF_HEADER = b"x-csrftoken"
_SECRET_SETTING = "csrf_secret"
_MAX_AGE_S = 400 * 24 * 3600  # the most that browsers keep


class SettingStore(Protocol):
    """Settings that outlive the process."""

    async def ensure_setting(self, key: str, value: str) -> str: ...


async def load_csrf_secret(store: SettingStore) -> bytes:
    """Return the persisted secret, made at the first start: pages stay valid over a restart."""
    return bytes.fromhex(await store.ensure_setting(_SECRET_SETTING, secrets.token_hex(32)))


class CsrfSigner:
    """Makes and checks tokens `nonce.signature`, the signature over nonce and login."""

    def __init__(self, secret: bytes, *, secure_cookie: bool) -> None:
        self._secret = secret
        self._secure_cookie = secure_cookie

    def make(self, login: bytes) -> str:
        """Return a new token for a login's digest (empty for nobody)."""
        nonce = secrets.token_hex(16)
        return f"{nonce}.{self._signature(nonce, login)}"

    def is_valid(self, token: str, login: bytes) -> bool:
        """Tell whether the token is ours and of this login."""
        nonce, _, signature = token.partition(".")
        if not token.isascii():
            return False
        return hmac.compare_digest(signature, self._signature(nonce, login))

    def _signature(self, nonce: str, login: bytes) -> str:
        return hmac.new(self._secret, nonce.encode() + b"|" + login, sha256).hexdigest()

    def valid_cookies(self, scope: Scope) -> list[str]:
        """Return the request's CSRF cookies that are ours and of its login."""
        login = login_digest(scope)
        name = own_cookie(scope, CSRF_COOKIE)
        return [v for v in cookie_values(scope, name) if self.is_valid(v, login)]

    def token(self, scope: Scope) -> str:
        """Return the token for this response's forms, and see that the browser holds it.

        A missing, foreign or outdated cookie is replaced; a valid one is kept, so that pages
        that are open elsewhere stay valid.
        """
        record = request_security(scope)
        if record.csrf_token is None:
            valid = self.valid_cookies(scope)
            record.csrf_token = valid[0] if valid else self.issue(scope)
        return record.csrf_token

    def issue(self, scope: Scope) -> str:
        """Return a new token for the request's login, set as a cookie on its response."""
        record = request_security(scope)
        record.csrf_token = self.make(login_digest(scope))
        record.cookies[CSRF_COOKIE] = set_cookie_value(
            own_cookie(scope, CSRF_COOKIE),
            record.csrf_token,
            secure=self._secure_cookie,
            http_only=False,
            max_age_s=_MAX_AGE_S,
        )
        return record.csrf_token


def csrf_token(request: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the token for a form's hidden field `_csrf_token`, in templates and handlers.

    Call it before the response starts, since it may have to set the cookie.
    """
    signer: CsrfSigner = request.app.state.csrf_signer
    return signer.token(request.scope)

"""Where accounts are required, nothing but what is marked open is for people without one."""

from __future__ import annotations

from typing import Any

from litestar.connection import Request
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from app.security.login import current_user
from app.security.middleware import is_api_path

_OPEN_KEY = "open_to_all"
OPEN: dict[str, Any] = {_OPEN_KEY: True}  # `opt` of a route that sees to its guests itself


class SignInRequired(HTTPException):
    """The browser is not signed in, or its login has ended."""

    status_code = 401


class AccountGate(ASGIMiddleware):
    """Raises SignInRequired for whatever is not open, unless an account is signed in.

    The API has its keys. A new route is closed until it says otherwise.
    """

    scopes = (ScopeType.HTTP,)
    exclude_opt_key = _OPEN_KEY

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        if not is_api_path(scope["path"]):
            request: Request[Any, Any, Any] = scope["litestar_app"].request_class(scope, receive)
            if await current_user(request) is None:
                raise SignInRequired("You are not signed in.")
        await next_app(scope, receive, send)

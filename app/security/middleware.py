"""Refuses requests that do not come from our own pages, before any route sees them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from litestar.connection import Request
from litestar.enums import RequestEncodingType, ScopeType
from litestar.exceptions import HTTPException, PermissionDeniedException
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from app.security.csrf import CSRF_FIELD, CSRF_HEADER, CsrfSigner
from app.security.scope import header_values

API_PREFIX = "/v1"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FORM_TYPES = frozenset({RequestEncodingType.URL_ENCODED, RequestEncodingType.MULTI_PART})


class UnsupportedMediaType(HTTPException):
    """A browser route takes forms only: a JSON or text body is no form of ours."""

    status_code = 415


class RequestGuard(ASGIMiddleware):
    """Origin for all unsafe methods; content type and CSRF token for those outside /v1."""

    scopes = (ScopeType.HTTP,)

    def __init__(self, public_origin: str | None = None) -> None:
        """`public_origin` is that of the pages where a proxy names the host otherwise."""
        self._public_origin = public_origin

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass the request on, or raise 403 or 415. Its Host was checked before."""
        if _is_unsafe(scope):
            _check_origin(scope, self._public_origin)
            if not is_api_path(scope["path"]):
                await _check_token(scope, receive)
        await next_app(scope, receive, send)


def is_api_path(path: str) -> bool:
    """Tell whether a path is of the API, which takes bearer keys and never cookies."""
    return path == API_PREFIX or path.startswith(API_PREFIX + "/")


def _is_unsafe(scope: Scope) -> bool:
    # Only HTTP scopes come here; the declared type also covers websockets, which have no method.
    return scope["method"] not in _SAFE_METHODS  # type: ignore[typeddict-item]


def _check_origin(scope: Scope, public_origin: str | None) -> None:
    """Raise unless the browser, where it says so, sends from a page of this very host.

    Under our referrer policy `no-referrer` browsers send `Origin: null` with our own forms:
    then `Sec-Fetch-Site` decides, and where that is missing (plain HTTP beyond loopback) the
    token alone.
    """
    if any(site not in ("same-origin", "none") for site in header_values(scope, b"sec-fetch-site")):
        raise PermissionDeniedException("This request came from another site.")
    host = header_values(scope, b"host")[0].lower()
    public_host = urlsplit(public_origin).netloc if public_origin else None
    for origin in header_values(scope, b"origin"):
        if origin == "null" or origin.lower() == public_origin:
            continue
        parts = urlsplit(origin.lower())
        # The public host has one scheme: a page of the other one may be anybody's on the way.
        own = parts.netloc == host and host != public_host
        if not (own and parts.scheme in ("http", "https")):
            raise PermissionDeniedException("This request came from another site.")


async def _check_token(scope: Scope, receive: Receive) -> None:
    request: Request[Any, Any, Any] = scope["litestar_app"].request_class(scope, receive)
    has_body = (
        "content-type" in request.headers or request.headers.get("content-length", "0") != "0"
    )
    content_type, _ = request.content_type
    is_form = content_type in _FORM_TYPES
    if has_body and not is_form:
        raise UnsupportedMediaType("Send this as a form.")
    given = header_values(scope, CSRF_HEADER)
    form = None
    if not given and is_form:
        # The parsed form stays in the scope, so the handler reads it again at no cost.
        form = await request.form()
        field = form.get(CSRF_FIELD)
        given = [field] if isinstance(field, str) else []
    signer: CsrfSigner = request.app.state.csrf_signer
    if len(given) != 1 or given[0] not in signer.valid_cookies(scope):
        if form is not None:
            await form.close()  # uploaded files: no handler will
        raise PermissionDeniedException(
            "This page is out of date or its cookies are blocked. Reload it and try again."
        )

"""Headers of every response, errors and static files included."""

from __future__ import annotations

from litestar.types import Message, Scope

from app.security.scope import add_header, append_cookie, header_of, request_security

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
STATIC_PREFIX = "/static/"

_ALWAYS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"x-content-type-options", "nosniff"),
    (b"referrer-policy", "no-referrer"),
    (b"cross-origin-opener-policy", "same-origin"),
    (b"cross-origin-resource-policy", "same-origin"),
)


async def add_security_headers(message: Message, scope: Scope) -> None:
    """Complete a response start: policy headers, no-store on all but static files, cookies."""
    if message["type"] != "http.response.start":
        return
    for name, value in _ALWAYS:
        add_header(message, name, value)
    if scope["path"].startswith(STATIC_PREFIX):
        # The files keep their names over an update: ask each time, ETag answers.
        add_header(message, b"cache-control", "no-cache", replace=False)
    else:
        # A response that forbids more than that keeps its own.
        own = header_of(message, b"cache-control")
        if "no-store" not in own:
            add_header(message, b"cache-control", "no-store")
    for cookie in request_security(scope).cookies.values():
        append_cookie(message, cookie)

"""What comes before routing, so that it holds for paths and methods that no route has."""

from __future__ import annotations

from typing import cast

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send
from msgspec.json import encode

from app.api.errors import ApiError, error_json
from app.exposure import TrustedProxies
from app.security.hosts import AllowedHosts
from app.security.middleware import is_api_path
from app.security.scope import header_values

_FORWARDED = (b"forwarded", b"x-real-ip", b"x-forwarded-")


class Entrance:
    """Refuses foreign hosts with 400; answers HEAD as GET (the HTTP server leaves the body out).

    With `proxies` what these say of the browser replaces what the connection says, and others are
    not heard. Without, a request that came through a proxy is refused with 400: on a server that
    takes everybody for the person in front of the machine it would be a stranger's.
    """

    def __init__(
        self, app: ASGIApp, allowed_hosts: AllowedHosts, proxies: TrustedProxies | None
    ) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        if not self._allowed_hosts.allows(header_values(scope, b"host")):
            await _refuse(
                scope,
                send,
                "This server does not answer to that host name. See the settings allowed_hosts "
                "and public_url.",
            )
            return
        if any(_is_forwarding(name) for name, _ in scope["headers"]):
            if self._proxies is None:
                await _refuse(
                    scope,
                    send,
                    "This request came through a proxy, but the server was not told its public "
                    "address. See the setting public_url.",
                )
                return
            scope = _as_forwarded(scope, self._proxies)
        if scope["method"] == "HEAD":
            # The HTTP server keeps its own scope, and by it knows that no body may go out.
            scope = cast(HTTPScope, {**scope, "method": "GET"})
        await self._app(scope, receive, send)


def _is_forwarding(name: bytes) -> bool:
    return name.lower().startswith(_FORWARDED)


def _as_forwarded(scope: HTTPScope, proxies: TrustedProxies) -> HTTPScope:
    """The scope with the browser's address and scheme, without the headers that told them."""
    peer, port = scope["client"] or ("", 0)
    changed = {
        **scope,
        "headers": [pair for pair in scope["headers"] if not _is_forwarding(pair[0])],
    }
    if proxies.trusts(peer):
        client = proxies.client(peer, header_values(scope, b"x-forwarded-for"))
        changed["client"] = (client, port if client == peer else 0)
        schemes = ",".join(header_values(scope, b"x-forwarded-proto")).lower().split(",")
        if schemes[-1].strip() in ("http", "https"):
            changed["scheme"] = schemes[-1].strip()
    return cast(HTTPScope, changed)


async def _refuse(scope: HTTPScope, send: Send, text: str) -> None:
    """400 in words, under /v1 in the shape that clients of the API read."""
    body, media_type = f"{text}\n".encode(), b"text/plain; charset=utf-8"
    if is_api_path(scope["path"]):
        body, media_type = encode(error_json(ApiError(text))), b"application/json"
    headers = [(b"content-type", media_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

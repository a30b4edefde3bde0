"""What comes before routing, so that it holds for paths and methods that no route has."""

from __future__ import annotations

from typing import cast

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from app.security.hosts import AllowedHosts
from app.security.scope import header_values


class Entrance:
    """Refuses foreign hosts with 400; answers HEAD as GET (the HTTP server leaves the body out)."""

    def __init__(self, app: ASGIApp, allowed_hosts: AllowedHosts) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        if not self._allowed_hosts.allows(header_values(scope, b"host")):
            await _refuse_host(send)
            return
        if scope["method"] == "HEAD":
            # The HTTP server keeps its own scope, and by it knows that no body may go out.
            scope = cast(HTTPScope, {**scope, "method": "GET"})
        await self._app(scope, receive, send)


async def _refuse_host(send: Send) -> None:
    body = b"This server does not answer to that host name. See the setting allowed_hosts.\n"
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

"""An id for each request, in its response and in every log line that it causes."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import cast

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from app.logs import request_id
from app.metrics import Metrics
from app.security.scope import add_header, header_values

logger = logging.getLogger(__name__)

HEADER = b"x-request-id"
UNMATCHED = "none"
_GIVEN = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
_KEY = "rejoinder_request_id"


def id_of(scope: Scope) -> str:
    """The request's id: the one it came with when that is well formed, else a new one."""
    state = scope.setdefault("state", {})
    if _KEY not in state:
        given = header_values(scope, HEADER)
        known = len(given) == 1 and _GIVEN.fullmatch(given[0]) is not None
        state[_KEY] = given[0] if known else secrets.token_hex(8)
    return cast(str, state[_KEY])


async def add_request_id(message: Message, scope: Scope) -> None:
    """Before a response is sent: give it the id."""
    if message["type"] == "http.response.start":
        add_header(message, HEADER, id_of(scope))


class RequestLog:
    """Wraps the application: counts each request, and logs it at debug level, by its route.

    A path as it was asked for is not logged: a search has words in it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        status = 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = request_id.set(id_of(scope))
        try:
            await self._app(scope, receive, note_status)
        finally:
            took_s = time.monotonic() - begun
            route = scope.get("path_template") or UNMATCHED
            method = str(scope["method"])
            if method not in _METHODS:
                method = "other"
            self._metrics.request(method, route, status, took_s)
            logger.debug(
                "%s %s: %d in %.0f ms",
                method,
                route,
                status,
                took_s * 1e3,
                extra={
                    "fields": {
                        "method": method,
                        "route": route,
                        "status": status,
                        "took_ms": round(took_s * 1e3, 1),
                    }
                },
            )
            request_id.reset(token)

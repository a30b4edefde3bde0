"""Event streams of the API, and requests whose client may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import msgspec
from litestar.types import Receive, Scope, Send

from app.api.generation import Generation
from app.api.requests import ApiRequest
from app.streams import EventStream

T = TypeVar("T")

HEARTBEAT = b": still here\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str = "") -> bytes:
    """One event with JSON data; `name` is for clients that tell events apart by it."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class ApiStream(EventStream):
    """A stream of one request's answers, which end with it."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation, **kwargs: Any) -> None:
        super().__init__(events, **kwargs)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._generation.cancel()


class ClientGone(Exception):
    """The client closed its connection before the answer was ready."""


async def while_connected(request: ApiRequest, work: Awaitable[T]) -> T:
    """The result of `work`, unless the client leaves before: then ClientGone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)

"""What running answers have so far, and the event streams that show it.

A turn belongs to the server: it is fed here whether or not somebody watches. Text is rendered
only while somebody does, once for all of them. A connection's first event is the whole answer so
far; later ones, at most five a second, carry the blocks closed since and the open block. A
connection that ends without the close event is made again by the browser.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Send

from app.live_turn import LiveTurn
from app.pacing import Pace

__all__ = ["EventStream", "LiveTurn", "TurnHub", "encode_event", "finished_stream"]

HEARTBEAT_S = 10.0
# Events, not comments: the page's script sees them, and their absence after sleep.
HEARTBEAT = b"event: still-here\ndata: -\n\n"
CLOSE_EVENT = b"event: turn-end\ndata: done\n\n"
# Over HTTP/1.1 a browser opens six connections to a server; pages and forms need some.
STREAMS_PER_BROWSER = 4
LATER_EVENT = b"event: later\nretry: 2500\ndata: -\n\n"
_LINE_ENDS = re.compile(r"\r\n|\r|\n")


def encode_event(html: str) -> bytes:
    """One unnamed event with `html` as its data, line ends as the protocol wants them."""
    lines = "".join(f"data: {line}\n" for line in _LINE_ENDS.split(html))
    return f"{lines}\n".encode()


class FrameRenderer(Protocol):
    """Renders what one event shows of a running turn."""

    def __call__(self, turn: LiveTurn, *, first_block: int, whole: bool) -> str: ...


# Renders the last event; it is given the HTML of the blocks that were not yet seen closed.
FinishedRenderer = Callable[[str], Awaitable[str]]


class _Stream:
    """One connection that watches a turn."""

    def __init__(self, turn: LiveTurn) -> None:
        self.turn = turn
        self.gives_way = False


class TurnHub:
    """All running turns by id, and the streams that watch them. Event loop only."""

    def __init__(self, frame: FrameRenderer) -> None:
        self._frame = frame
        self._turns: dict[str, LiveTurn] = {}
        self._pace = Pace()
        self._streams: dict[bytes, list[_Stream]] = {}  # by browser, the oldest first
        self._closing = False

    def open(self, *, turn_id: str, chat_id: str, message_id: str) -> LiveTurn:
        turn = LiveTurn(
            turn_id=turn_id,
            chat_id=chat_id,
            message_id=message_id,
            pace=self._pace,
            moved=self._count_queue,
        )
        self._turns[turn_id] = turn
        self._count_queue()
        return turn

    def get(self, turn_id: str) -> LiveTurn | None:
        return self._turns.get(turn_id)

    def of_chat(self, chat_id: str) -> LiveTurn | None:
        """The chat's running turn; there is at most one."""
        return next((turn for turn in self._turns.values() if turn.chat_id == chat_id), None)

    def running(self) -> list[LiveTurn]:
        return list(self._turns.values())

    def close(self, turn: LiveTurn) -> None:
        """Forget a turn whose end is in the database, and tell its watchers."""
        self._turns.pop(turn.turn_id, None)
        turn.end()
        self._count_queue()

    def end_streams(self) -> None:
        """End every stream without its close event, so that browsers come back after a restart."""
        self._closing = True
        for turn in self._turns.values():
            turn.wake()

    async def watch(
        self, turn: LiveTurn, finished: FinishedRenderer, *, browser: bytes = b""
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a running turn, then its finished HTML and the close event.

        `browser` tells one from another: of too many streams in one, the oldest makes way, and
        comes back a little later.
        """
        stream = self._admit(turn, browser)
        turn.join()
        shown_version, shown_blocks, whole = -1, 0, True
        try:
            while not (turn.finished or self._closing or stream.gives_way):
                if turn.version != shown_version:
                    key = (shown_blocks, whole)
                    if key not in turn.frames:
                        began = time.thread_time()
                        html = self._frame(turn, first_block=shown_blocks, whole=whole)
                        turn.frames[key] = encode_event(html)
                        turn.spent_s += time.thread_time() - began
                    event = turn.frames[key]
                    shown_version, shown_blocks = turn.version, len(turn.closed_blocks)
                    whole = False
                    yield event
                    continue
                changed = turn.changed
                try:
                    # Not wait_for: in Python 3.11 it loses a cancellation that meets the wake-up.
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
                except TimeoutError:
                    yield HEARTBEAT
        finally:
            turn.leave()
            self._dismiss(stream, browser)
        if turn.finished:
            yield encode_event(await finished(turn.unseen(shown_blocks)))
            yield CLOSE_EVENT
        elif stream.gives_way:
            yield LATER_EVENT

    def _count_queue(self) -> None:
        queued = (turn for turn in self._turns.values() if turn.phase == "queued")
        for ahead, turn in enumerate(queued):
            turn.set_place(ahead)

    def _admit(self, turn: LiveTurn, browser: bytes) -> _Stream:
        stream = _Stream(turn)
        if browser:
            streams = self._streams.setdefault(browser, [])
            staying = [one for one in streams if not one.gives_way]
            if len(staying) >= STREAMS_PER_BROWSER:
                staying[0].gives_way = True
                staying[0].turn.wake()
            streams.append(stream)
        return stream

    def _dismiss(self, stream: _Stream, browser: bytes) -> None:
        if browser:
            self._streams[browser].remove(stream)
            if not self._streams[browser]:
                del self._streams[browser]


async def finished_stream(finished: FinishedRenderer) -> AsyncIterator[bytes]:
    """The stream of a turn that had ended before: one final event, then close."""
    yield encode_event(await finished(""))
    yield CLOSE_EVENT


class EventStream(ASGIResponse):
    """Sends events until they end or the client leaves; either way the generator is closed."""

    _should_set_content_length = False

    def __init__(self, events: AsyncIterator[bytes], **kwargs: Any) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={
                "Cache-Control": "no-store, no-transform",
                "X-Accel-Buffering": "no",
            },
            **kwargs,
        )
        self._events = events

    async def send_body(self, send: Send, receive: Receive) -> None:
        """Stream the events. The headers are out already, so a proxy sees bytes at once."""

        async def client_left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def send_events() -> None:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        sending = asyncio.ensure_future(send_events())
        leaving = asyncio.ensure_future(client_left())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()

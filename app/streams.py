"""What running answers have so far, and the event streams that show it.

A turn belongs to the server: it is fed here whether or not somebody watches. Text is rendered
only while somebody does, once for all of them. A connection's first event is the whole answer so
far; later ones, at most five a second, carry the blocks closed since and the open block.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Protocol

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Send

from app.rendering import BlockRenderer
from engine.messages import Phase

FRAME_GAP_S = 0.2
HEARTBEAT_S = 10.0
HEARTBEAT = b": still here\n\n"
CLOSE_EVENT = b"event: turn-end\ndata: done\n\n"
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


class LiveTurn:
    """One running answer. Owned by the event loop; `app.chat` feeds it, streams read it."""

    def __init__(self, *, turn_id: str, chat_id: str, message_id: str) -> None:
        self.turn_id = turn_id
        self.chat_id = chat_id
        self.message_id = message_id
        self.phase: Phase = "queued"
        self.done = 0  # tokens of `total` in this phase
        self.total = 0
        self.token_ids: list[int] = []
        self.finished = False
        self.saved_tokens = 0  # how many ids the database has
        self.watchers = 0
        self.version = 0  # counts what was rendered
        self.closed_blocks: list[str] = []
        self.open_block = ""
        self.changed = asyncio.Event()  # set, and replaced, at each new version and at the end
        self.frames: dict[tuple[int, bool], bytes] = {}  # of this version
        self._renderer = BlockRenderer()
        self._texts: list[str] = []
        self._dirty = asyncio.Event()
        self._rendering: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def text(self) -> str:
        """The answer so far, byte for byte."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def set_status(self, phase: Phase, done: int, total: int) -> None:
        self.phase, self.done, self.total = phase, done, total
        self._dirty.set()

    def append(self, text: str, token_ids: Iterable[int]) -> None:
        self.phase = "answering"
        self.token_ids.extend(token_ids)
        if text:
            self._texts.append(text)
        self._dirty.set()

    def end(self) -> None:
        """No more text comes; its watchers fetch the finished answer."""
        self.finished = True
        if self._rendering is not None:
            self._rendering.cancel()
            self._rendering = None
        self._ended.set()
        self._tell()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def render(self) -> None:
        """Bring the rendered blocks up to date with the text."""
        self._dirty.clear()
        update = self._renderer.feed(self.text)
        self.closed_blocks.extend(update.closed)
        self.open_block = update.open
        self.version += 1
        self.frames.clear()
        self._tell()

    def unseen(self, first_block: int) -> str:
        """HTML of the blocks from `first_block` on and of the open one, of all the text."""
        if self._dirty.is_set():
            self.render()
        return "".join(self.closed_blocks[first_block:]) + self.open_block

    def join(self) -> None:
        """Count a watcher; the first one starts the rendering."""
        self.watchers += 1
        if self._rendering is None and not self.finished:
            self.render()
            self._rendering = asyncio.create_task(self._render_while_watched())

    def leave(self) -> None:
        self.watchers -= 1
        if self.watchers == 0 and self._rendering is not None:
            self._rendering.cancel()
            self._rendering = None

    async def _render_while_watched(self) -> None:
        while True:
            await asyncio.sleep(FRAME_GAP_S)
            await self._dirty.wait()
            self.render()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class TurnHub:
    """All running turns by id, and the streams that watch them. Event loop only."""

    def __init__(self, frame: FrameRenderer) -> None:
        self._frame = frame
        self._turns: dict[str, LiveTurn] = {}
        self._closing = False

    def open(self, *, turn_id: str, chat_id: str, message_id: str) -> LiveTurn:
        turn = LiveTurn(turn_id=turn_id, chat_id=chat_id, message_id=message_id)
        self._turns[turn_id] = turn
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

    def end_streams(self) -> None:
        """End every stream without its close event, so that browsers come back after a restart."""
        self._closing = True
        for turn in self._turns.values():
            turn.changed.set()

    async def watch(self, turn: LiveTurn, finished: FinishedRenderer) -> AsyncIterator[bytes]:
        """Yield the events of a running turn, then its finished HTML and the close event."""
        turn.join()
        shown_version, shown_blocks, whole = -1, 0, True
        try:
            while not turn.finished and not self._closing:
                if turn.version != shown_version:
                    key = (shown_blocks, whole)
                    if key not in turn.frames:
                        html = self._frame(turn, first_block=shown_blocks, whole=whole)
                        turn.frames[key] = encode_event(html)
                    event = turn.frames[key]
                    shown_version, shown_blocks = turn.version, len(turn.closed_blocks)
                    whole = False
                    yield event
                    continue
                changed = turn.changed
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield HEARTBEAT
        finally:
            turn.leave()
        if turn.finished:
            yield encode_event(await finished(turn.unseen(shown_blocks)))
            yield CLOSE_EVENT


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

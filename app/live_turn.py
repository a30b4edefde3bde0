"""What a running answer has so far, as text and as rendered blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Literal

from app.pacing import Pace
from app.rendering import BlockRenderer
from engine.messages import Phase


class LiveTurn:
    """One running answer. Owned by the event loop; `app.chat` feeds it, streams read it.

    `moved` is called when it enters or leaves the queue.
    """

    def __init__(
        self,
        *,
        turn_id: str,
        chat_id: str,
        message_id: str,
        pace: Pace,
        moved: Callable[[], None],
    ) -> None:
        self.turn_id = turn_id
        self.chat_id = chat_id
        self.message_id = message_id
        self.phase: Phase | Literal["stopping"] = "queued"
        self.done = 0  # tokens of `total` in this phase; in the queue: answers before this one
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
        self.spent_s = 0.0  # processor time since the last frame
        self._pace = pace
        self._moved = moved
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
        if self.phase == "stopping":
            return
        was_queued = self.phase == "queued"
        if phase == "queued":  # its place there is the hub's to know
            done = self.done if was_queued else 0
        self.phase, self.done, self.total = phase, done, total
        self._dirty.set()
        if was_queued != (phase == "queued"):
            self._moved()

    def set_place(self, ahead: int) -> None:
        """So many answers are before this one in the queue."""
        if self.phase == "queued" and self.done != ahead:
            self.done = ahead
            self._dirty.set()

    def set_stopping(self) -> None:
        """The engine was asked to stop; it has not confirmed it yet."""
        self.phase = "stopping"
        self._dirty.set()
        self._moved()

    def append(self, text: str, token_ids: Iterable[int]) -> None:
        if self.phase != "answering":
            self.set_status("answering", 0, 0)
        self.token_ids.extend(token_ids)
        if text:
            self._texts.append(text)
        self._dirty.set()

    def end(self) -> None:
        """No more text comes; its watchers fetch the finished answer."""
        self.finished = True
        if self._rendering is not None:
            self._stop_rendering()
        self._ended.set()
        self.wake()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def render(self) -> None:
        """Bring the rendered blocks up to date with the text."""
        began = time.thread_time()
        self._dirty.clear()
        update = self._renderer.feed(self.text)
        self.closed_blocks.extend(update.closed)
        self.open_block = update.open
        self.version += 1
        self.frames.clear()
        self.wake()
        self.spent_s += time.thread_time() - began

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
            self._stop_rendering()

    def _stop_rendering(self) -> None:
        assert self._rendering is not None
        self._rendering.cancel()
        self._rendering = None
        self._pace.forget(self.turn_id)

    async def _render_while_watched(self) -> None:
        while True:
            self._pace.note(self.turn_id, self.spent_s)
            self.spent_s = 0.0
            await asyncio.sleep(self._pace.wait_s(asyncio.get_running_loop().time()))
            await self._dirty.wait()
            self.render()

    def wake(self) -> None:
        """Have every watcher look again."""
        self.changed.set()
        self.changed = asyncio.Event()

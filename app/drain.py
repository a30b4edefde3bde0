"""The end of the server in order: nothing new, then what runs has its time, then the rest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any

from app.engine_gate import EngineGate

logger = logging.getLogger(__name__)

RESTART_S = 10  # what a restart takes after the drain, for Retry-After
HURRIED_S = 2.0  # for the engine's last flush once a second signal came
STORED_S = 2.0  # for the ends of answers to be stored and shown

Handler = Callable[[int, FrameType | None], object]


class Drain:
    """Owns what happens between the first signal and the end. Event loop only.

    The first signal closes the gate to new turns; when none is open any more, or after `limit_s`,
    event streams are ended and the signal goes on to whoever handled it before, which ends the
    server. A second signal cuts all waiting short.
    """

    def __init__(self, gate: EngineGate, *, limit_s: float) -> None:
        self._gate = gate
        self._limit_s = limit_s
        self._hurried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._task is not None

    def signalled(
        self,
        end_streams: Sequence[Callable[[], None]],
        shown: Callable[[], bool],
        go_on: Callable[[], object],
    ) -> None:
        """A signal came: begin, or hurry.

        `shown` tells whether no answer is left whose end has not been stored and shown.
        """
        if self._task is not None:
            logger.warning("a second signal: the server ends at once")
            self._hurried.set()
            return
        retry_after_s = math.ceil(self._limit_s) + RESTART_S
        self._gate.drain(retry_after_s)
        self._task = asyncio.create_task(self._run(end_streams, shown, go_on), name="drain")

    async def _run(
        self,
        end_streams: Sequence[Callable[[], None]],
        shown: Callable[[], bool],
        go_on: Callable[[], object],
    ) -> None:
        running = self._gate.open_turns
        if running:
            logger.warning(
                "no new questions from now on; %d answers have %g s to end, "
                "a second signal ends the server at once",
                running,
                self._limit_s,
            )
            await self._at_most(self._gate.wait_idle(), self._limit_s)
            await self._at_most(_until(shown), STORED_S)
        if self._gate.open_turns:
            logger.warning("%d answers are cut off", self._gate.open_turns)
        for end in end_streams:
            end()
        go_on()

    async def close_engine(self) -> None:
        """Let the engine flush its checkpoints; briefly once somebody is in a hurry."""
        closing = asyncio.create_task(self._gate.close())
        hurried = asyncio.create_task(self._hurried.wait())
        try:
            await asyncio.wait([closing, hurried], return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                await asyncio.wait([closing], timeout=HURRIED_S)
            if not closing.done():
                closing.cancel()  # which kills the process
            await asyncio.gather(closing, return_exceptions=True)
        finally:
            hurried.cancel()

    async def _at_most(self, work: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Wait for it, for a second signal or for the limit, whichever comes first."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self._hurried.wait())]
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def on_signals(
        self, end_streams: Sequence[Callable[[], None]], shown: Callable[[], bool]
    ) -> Iterator[None]:
        """Take SIGINT and SIGTERM over from whoever has them; they get them after the drain.

        uvicorn waits for open connections before it runs the lifespan's end, and a stream stays
        open as long as its turn runs.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def on_signal(number: int, frame: FrameType | None) -> None:
            previous = before[signal.Signals(number)]

            def go_on() -> None:
                if callable(previous):
                    previous(number, frame)

            loop.call_soon_threadsafe(self.signalled, end_streams, shown, go_on)

        for number in before:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) is on_signal:
                    signal.signal(number, handler)


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.02)

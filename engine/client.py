"""What the app talks to: the engine process, started, watched and restarted from here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.connection import EngineProcess
from engine.errors import EngineError, EngineUnavailable, ModelError
from engine.messages import (
    Cancel,
    Collect,
    Delta,
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    Fatal,
    Forget,
    Forgotten,
    FromEngine,
    GetStats,
    Shutdown,
    Stats,
    Status,
    Submit,
    Warm,
)
from engine.turn_stream import Places, Reservation, TurnStream

__all__ = ["DEFAULT_COMMAND", "Engine", "EngineClient", "Reservation", "TurnStream"]

log = logging.getLogger(__name__)

DEFAULT_COMMAND = (sys.executable, "-m", "app.engine_process")
RESTART_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # the last one repeats
STOP_LIMIT_S = 10.0  # a Stop that the engine does not confirm is answered without it
PINGS_MISSED = 4  # in a row, a part of the watchdog's time each, before a process is given up
STEADY_S = 60.0  # a process that lived this long is restarted with the first delay again
DIED = "The engine stopped while it worked on this answer. It is being started again."

STALLED = (
    "The engine made no progress for {seconds:g} s while it worked on this answer. "
    "It is being started again."
)
NOT_CONFIRMED = "The engine did not confirm the stop; the answer is cut off here."


class Engine(Protocol):
    """What the app needs of an engine, embedded or remote. Called on the app's event loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool: ...

    def reserve(self) -> Reservation:
        """Hold one place of the bounded queue. Raises QueueFull or EngineUnavailable."""

    def submit(self, turn: Submit, reservation: Reservation) -> TurnStream:
        """Start a turn; its end releases the reservation."""

    async def cancel(self, request_id: str) -> None:
        """Stop a turn; returns when its stream has ended, confirmed by the engine or given up."""

    async def warm(self, warm: Warm) -> None:
        """Ask for a chat's state to be brought back; nothing confirms it."""

    async def forget(self, chat_ids: Sequence[str]) -> None:
        """Delete what is held of these chats; returns when that is done.

        Raises EngineUnavailable, and EngineError when the engine could not.
        """

    async def collect(self, owners: Sequence[str]) -> None:
        """Have checkpoints of other weights dropped, and those of these owners of the store.

        Returns when that was taken in hand. Raises EngineUnavailable.
        """

    async def stats(self) -> EngineStats:
        """Raises EngineUnavailable."""

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call back after the engine died and its running turns were failed."""

    async def close(self) -> None:
        """Let the engine flush what it has to save, and end it."""


@dataclass
class _Running:
    stream: TurnStream
    reservation: Reservation
    cancelled: bool = False

    def end(self, event: Done | Failed) -> None:
        self.reservation.release()
        self.stream.push(event)


class EngineClient:
    """Owns the engine process and every running turn's stream. Used on one event loop."""

    def __init__(self, config: EngineConfig, command: Sequence[str], watchdog_s: float) -> None:
        """Use `start`."""
        self._watchdog_s = watchdog_s
        self._why_ended = DIED  # what turns are told that the process leaves behind
        self._config = config
        self._command = tuple(command)
        self._places = Places(config.max_batch + config.max_queue)
        self._running: dict[str, _Running] = {}
        self._calls: dict[int, asyncio.Future[Forgotten | Stats]] = {}
        self._call_ids = itertools.count(1)
        self._death_callbacks: list[Callable[[], None]] = []
        self._process: EngineProcess | None = None
        self._info: EngineInfo | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig | Awaitable[EngineConfig],
        *,
        command: Sequence[str] = DEFAULT_COMMAND,
        watchdog_s: float = 60.0,
    ) -> EngineClient:
        """Start the engine process and wait until it can serve.

        `command` is run with the number of its end of the socket appended; a configuration that
        is not known yet is waited for while it imports what it needs. A process whose loop
        does not come round for `watchdog_s` is killed, and another started. Raises ModelError with
        the engine's own reason, EngineUnavailable if the process ends without giving one.
        """
        process = await EngineProcess.spawn(command)
        try:
            known = config if isinstance(config, EngineConfig) else await config
        except BaseException:
            await process.end(0)
            raise
        client = cls(known, command, watchdog_s)
        await client._begin(process)
        client._watcher = asyncio.create_task(client._watch(process), name="engine watcher")
        client._guard = asyncio.create_task(client._see_progress(), name="engine watchdog")
        return client

    @property
    def info(self) -> EngineInfo:
        """As the engine last sent it."""
        assert self._info is not None, "start() returns after it was received"
        return self._info

    @property
    def alive(self) -> bool:
        """The engine process runs and can serve."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def reserve(self) -> Reservation:
        """Hold one of `max_batch + max_queue` places. Raises QueueFull, EngineUnavailable."""
        if not self.alive:
            raise EngineUnavailable("the engine is not running; it is being started again")
        return self._places.take()

    def submit(self, turn: Submit, reservation: Reservation) -> TurnStream:
        """Start a turn. If the engine died meanwhile, the stream consists of that failure.

        Raises ValueError when the request id is running already or the reservation was released.
        """
        if turn.request_id in self._running:
            raise ValueError(f"request {turn.request_id} is running already")
        if not reservation.held:
            raise ValueError("the reservation was released")
        running = _Running(TurnStream(turn.request_id), reservation)
        if self._process is None:
            running.end(_died(turn.request_id, DIED))
        else:
            self._process.send(turn)
            self._running[turn.request_id] = running
        return running.stream

    async def cancel(self, request_id: str) -> None:
        """Stop a turn; returns when its stream has ended. An unknown id has ended already.

        One that the engine does not confirm within `STOP_LIMIT_S` fails here instead.
        """
        running = self._running.get(request_id)
        if running is None or self._process is None:
            return
        running.cancelled = True
        self._process.send(Cancel(request_id=request_id))
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await running.stream.wait_ended()
        except TimeoutError:
            log.error("the engine did not confirm a stop within %g s", STOP_LIMIT_S)
            self._running.pop(request_id, None)
            running.end(_died(request_id, NOT_CONFIRMED))

    async def warm(self, warm: Warm) -> None:
        """Ask for a chat's state to be brought back; dropped when the engine is not running."""
        if self._process is not None:
            self._process.send(warm)

    async def forget(self, chat_ids: Sequence[str]) -> None:
        """Delete what is held of these chats, on disk too.

        Raises EngineUnavailable, and EngineError when the engine could not.
        """
        call_id = next(self._call_ids)
        answer = await self._call(call_id, Forget(call_id=call_id, chat_ids=list(chat_ids)))
        if isinstance(answer, Forgotten) and answer.error:
            raise EngineError(answer.error)

    async def collect(self, owners: Sequence[str]) -> None:
        """Drop stale checkpoints and those of these owners. Raises EngineUnavailable."""
        call_id = next(self._call_ids)
        await self._call(call_id, Collect(call_id=call_id, owners=list(owners)))

    async def stats(self) -> EngineStats:
        """Answered between two steps of the engine. Raises EngineUnavailable."""
        call_id = next(self._call_ids)
        answer = await self._call(call_id, GetStats(call_id=call_id))
        assert isinstance(answer, Stats)
        return answer.stats

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call back on the event loop after the process died and running turns were failed."""
        self._death_callbacks.append(callback)

    async def close(self, *, limit_s: float = 15.0) -> None:
        """Fail running turns, and let the engine flush its checkpoints.

        It is killed when that takes longer than `limit_s`.
        """
        tasks = [task for task in (self._watcher, self._guard) if task is not None]
        self._watcher = self._guard = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        process, self._process = self._process, None
        self._fail_running("The server is shutting down.")
        if process is not None:
            process.send(Shutdown())
            await process.end(limit_s)

    async def _call(self, call_id: int, message: Forget | Collect | GetStats) -> Forgotten | Stats:
        if self._process is None:
            raise EngineUnavailable("the engine is not running; it is being started again")
        future: asyncio.Future[Forgotten | Stats] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._process.send(message)
            return await future
        finally:
            del self._calls[call_id]

    async def _begin(self, process: EngineProcess) -> None:
        """Have a new process serve; it is `self._process` from then on."""
        process.configure(self._config, self._dispatch)
        try:
            first = await process.first_message()
        except BaseException:
            await process.end(0)
            raise
        if not isinstance(first, EngineInfo):
            code = await process.end(5.0)
            if isinstance(first, Fatal):
                raise ModelError(first.reason)
            raise EngineUnavailable(f"the engine process ended at its start with code {code}")
        self._info = first
        self._process = process

    async def _watch(self, process: EngineProcess) -> None:
        """Wait for the process to die, say so, start another; until cancelled."""
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            started = loop.time()
            await process.closed.wait()
            self._process = None
            reason, self._why_ended = self._why_ended, DIED
            self._fail_running(reason)
            code = await process.end(2.0)
            log.error("the engine process %d ended with code %s", process.pid, code)
            for callback in self._death_callbacks:
                loop.call_soon(callback)  # what it raises does not end the watcher
            if loop.time() - started > STEADY_S:
                attempt = 0
            restarted: EngineProcess | None = None
            while restarted is None:
                delay = RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)]
                attempt += 1
                await asyncio.sleep(delay)
                try:
                    restarted = await EngineProcess.spawn(self._command)
                    await self._begin(restarted)
                except (ModelError, EngineUnavailable, OSError) as error:
                    restarted = None
                    log.error("the engine could not be started again: %s", error)
            process = restarted
            log.warning("the engine runs again as process %d", process.pid)

    async def _see_progress(self) -> None:
        """Ask the engine's loop for a sign of life, again and again; until cancelled.

        Counted in rounds of this task, so that a web process that was itself held up for a while
        blames nobody.
        """
        asked: asyncio.Task[EngineStats] | None = None
        asked_of: EngineProcess | None = None
        missed = 0
        try:
            while True:
                await asyncio.sleep(self._watchdog_s / PINGS_MISSED)
                process = self._process
                if asked is None or asked.done() or process is not asked_of:
                    missed = 0
                    if asked is not None and not asked.cancel():
                        asked.exception()  # of a process that died, which is told elsewhere
                    asked_of = process
                    asked = None if process is None else asyncio.create_task(self.stats())
                    continue
                missed += 1
                if process is not None and missed >= PINGS_MISSED:
                    log.error(
                        "the engine process %d made no progress for %g s, with %d answers running: "
                        "it is killed and started again",
                        process.pid,
                        self._watchdog_s,
                        len(self._running),
                    )
                    self._why_ended = STALLED.format(seconds=self._watchdog_s)
                    await process.end(0)
        finally:
            if asked is not None:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Status() | Delta():
                if (running := self._running.get(message.request_id)) is not None:
                    running.stream.push(message)
            case Done() | Failed():
                if (running := self._running.pop(message.request_id, None)) is not None:
                    stopped = isinstance(message, Done) and message.finish == "cancelled"
                    if stopped and not running.cancelled:  # by a signal: nobody asked for it
                        message = _died(message.request_id, DIED)
                    running.end(message)
            case Forgotten() | Stats():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case EngineInfo():
                self._info = message
            case Fatal():
                log.error("the engine ends: %s", message.reason)

    def _fail_running(self, reason: str) -> None:
        """Fail every stream and call of a process that is gone."""
        ended, self._running = self._running, {}
        for request_id, running in ended.items():
            running.end(_died(request_id, reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineUnavailable(reason))


def _died(request_id: str, reason: str) -> Failed:
    return Failed(request_id=request_id, kind="engine_died", reason=reason)

"""The engine as the rest of the app sees it: counted, and closed to new turns during a drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from app.faults import ServerDraining
from app.metrics import Metrics
from engine.client import Engine, Reservation, TurnStream
from engine.messages import Delta, Done, EngineInfo, EngineStats, Failed, Submit, TurnEvent, Warm


class EngineGate:
    """An `Engine`. Owns the number of open turns. Event loop only."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._retry_after_s: int | None = None
        engine.on_death(metrics.engine_restarted)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def alive(self) -> bool:
        return self._engine.alive

    @property
    def open_turns(self) -> int:
        return self._open

    @property
    def draining(self) -> bool:
        return self._retry_after_s is not None

    def drain(self, retry_after_s: int) -> None:
        """From now on `reserve` raises ServerDraining; what was submitted goes on."""
        self._retry_after_s = retry_after_s

    async def wait_idle(self) -> None:
        """Return when no turn is open."""
        await self._idle.wait()

    def reserve(self) -> Reservation:
        if self._retry_after_s is not None:
            raise ServerDraining(self._retry_after_s)
        return self._engine.reserve()

    def submit(self, turn: Submit, reservation: Reservation) -> TurnStream:
        stream = self._engine.submit(turn, reservation)
        self._open += 1
        self._idle.clear()
        submitted = time.monotonic()
        first = True

        def seen(event: TurnEvent) -> None:
            nonlocal first
            match event:
                case Delta() if first and event.token_ids:
                    first = False
                    self._metrics.first_token(self.info.model_name, time.monotonic() - submitted)
                case Done() | Failed():
                    self._open -= 1
                    if not self._open:
                        self._idle.set()
                    self._metrics.ended(self.info.model_name, event, time.monotonic() - submitted)

        stream.watch(seen)
        return stream

    async def cancel(self, request_id: str) -> None:
        await self._engine.cancel(request_id)

    async def warm(self, warm: Warm) -> None:
        if not self.draining:
            await self._engine.warm(warm)

    async def forget(self, chat_ids: Sequence[str]) -> None:
        await self._engine.forget(chat_ids)

    async def collect(self, owners: Sequence[str]) -> None:
        await self._engine.collect(owners)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    def on_death(self, callback: Callable[[], None]) -> None:
        self._engine.on_death(callback)

    async def close(self) -> None:
        await self._engine.close()

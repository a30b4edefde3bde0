"""A turn's events on the way to its reader, and the places of the bounded queue."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from engine.errors import QueueFull
from engine.messages import Done, Failed, TurnEvent


class TurnStream:
    """The events of one turn, for one reader on the event loop that pushes them.

    An async iterator; it ends after `Done` or `Failed`. Pushing never waits: what a slow reader
    has not taken yet is bounded by the turn's own length.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._events: deque[TurnEvent] = deque()
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()
        self._seen: Callable[[TurnEvent], None] | None = None

    def push(self, event: TurnEvent) -> None:
        """Add an event; those after the last one are dropped."""
        if self._ended.is_set():
            return
        self._events.append(event)
        self._arrived.set()
        if isinstance(event, Done | Failed):
            self._ended.set()
        if self._seen is not None:
            self._seen(event)

    def watch(self, seen: Callable[[TurnEvent], None]) -> None:
        """Call `seen` with each event as it is pushed, at once with those not yet read."""
        for event in self._events:
            seen(event)
        self._seen = seen

    @property
    def ended(self) -> bool:
        """`Done` or `Failed` was pushed (it may still wait for the reader)."""
        return self._ended.is_set()

    async def wait_ended(self) -> None:
        """Return when the turn has ended, read or not."""
        await self._ended.wait()

    def __aiter__(self) -> TurnStream:
        return self

    async def __anext__(self) -> TurnEvent:
        while not self._events:
            if self._ended.is_set():
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class Reservation:
    """One place of the bounded queue. `release` gives it back, once; later calls do nothing."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    @property
    def held(self) -> bool:
        return self._give_back is not None

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Places:
    """Counts the places in use and guesses when one comes free. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._mean_hold_s = 5.0  # moving average of how long a place was held

    def take(self) -> Reservation:
        """Raises QueueFull when none is free."""
        if self.in_use >= self.limit:
            # Places come free one after the other: the next after a `limit`-th of a holding time.
            retry_after = math.ceil(self._mean_hold_s / self.limit)
            raise QueueFull(self.limit, min(60, max(1, retry_after)))
        self.in_use += 1
        since = time.monotonic()

        def give_back() -> None:
            self.in_use -= 1
            self._mean_hold_s += 0.1 * (time.monotonic() - since - self._mean_hold_s)

        return Reservation(give_back)

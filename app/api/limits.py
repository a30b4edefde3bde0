"""Who may have how many answers at once: bounded for each user and key, fair between users."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator

from app.api.errors import busy
from engine.client import Engine, Reservation
from engine.errors import QueueFull

MAX_WAITING = 1024  # of all users together
PATIENCE_S = 30.0  # for places that chats in browsers have taken
_AGAIN_S = 0.1


class Ticket:
    """A request's way through the queue; `leave` gives back whatever it holds, once."""

    def __init__(self, queue: FairQueue, user_id: str, key_id: str, answers: int) -> None:
        self.user_id = user_id
        self.key_id = key_id
        self.answers = answers
        self.since = 0.0
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue: FairQueue | None = queue

    async def places(self, engine: Engine) -> list[Reservation]:
        """Wait for the request's turn, then for its places in the engine.

        Raises QueueFull when those stay taken, EngineUnavailable.
        """
        await asyncio.shield(self.granted)  # whoever stops waiting leaves by `leave`
        deadline = time.monotonic() + PATIENCE_S
        while True:
            places: list[Reservation] = []
            try:
                for _ in range(self.answers):
                    places.append(engine.reserve())
                return places
            except BaseException as error:
                for place in places:
                    place.release()
                if not isinstance(error, QueueFull) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_AGAIN_S)

    def leave(self) -> None:
        """Whether waiting or served: the next one may come."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.left(self)


class FairQueue:
    """Owns who runs and who waits. Event loop only.

    A free slot goes to the user who has the fewest answers running, so that the many requests of
    one user wait for each other and not the others for them.
    """

    def __init__(self, *, slots: int, per_user: int, waiting_per_user: int) -> None:
        """`slots` answers run at once, `per_user` of them for one user; then requests wait."""
        self._slots = slots
        self.per_user = min(per_user, slots)
        self._waiting_per_user = waiting_per_user
        self._running: Counter[str] = Counter()  # answers, by user
        self._in_use = 0
        self._by_key: Counter[str] = Counter()  # requests, running or waiting
        self._waiting: dict[str, deque[Ticket]] = {}  # by user, in order of their last grant
        self._mean_hold_s = 5.0

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._waiting.values())

    @property
    def running(self) -> int:
        return self._in_use

    def enter(self, user_id: str, key_id: str, key_limit: int | None, answers: int) -> Ticket:
        """A place in the queue. Raises ApiError (429, or 503 when all users together are many)."""
        line = self._waiting.get(user_id, ())
        must_wait = bool(line) or not self._fits(user_id, answers)
        if key_limit is not None and self._by_key[key_id] >= key_limit:
            raise busy(
                f"This key may have {key_limit} requests at once.", self._retry_after(len(line))
            )
        if must_wait and len(line) >= self._waiting_per_user:
            raise busy(
                f"You have as many requests at once as the server takes of one user: "
                f"{self.per_user} answers and {self._waiting_per_user} requests that wait.",
                self._retry_after(len(line)),
            )
        if must_wait and self.waiting >= MAX_WAITING:
            raise busy("The server is busy.", self._retry_after(len(line)), status=503)
        ticket = Ticket(self, user_id, key_id, answers)
        self._by_key[key_id] += 1
        self._waiting.setdefault(user_id, deque()).append(ticket)
        self._grant()
        return ticket

    def left(self, ticket: Ticket) -> None:
        """Called by the ticket."""
        self._by_key[ticket.key_id] -= 1
        if not self._by_key[ticket.key_id]:
            del self._by_key[ticket.key_id]
        if ticket.granted.done():
            self._in_use -= ticket.answers
            self._running[ticket.user_id] -= ticket.answers
            if not self._running[ticket.user_id]:
                del self._running[ticket.user_id]
            self._mean_hold_s += 0.1 * (time.monotonic() - ticket.since - self._mean_hold_s)
        else:
            with contextlib.suppress(ValueError):
                self._waiting[ticket.user_id].remove(ticket)
            self._forget_empty(ticket.user_id)
        self._grant()

    def _fits(self, user_id: str, answers: int) -> bool:
        return (
            self._in_use + answers <= self._slots
            and self._running[user_id] + answers <= self.per_user
        )

    def _grant(self) -> None:
        while True:
            able = [
                user_id
                for user_id, line in self._waiting.items()
                if self._running[user_id] + line[0].answers <= self.per_user
            ]
            if not able:
                return
            user_id = min(able, key=lambda one: self._running[one])
            ticket = self._waiting[user_id][0]
            if self._in_use + ticket.answers > self._slots:
                return  # it is this one's turn: smaller requests do not overtake it for ever
            line = self._waiting.pop(user_id)
            line.popleft()
            if line:
                self._waiting[user_id] = line  # behind the others
            self._in_use += ticket.answers
            self._running[user_id] += ticket.answers
            ticket.since = time.monotonic()
            ticket.granted.set_result(None)

    def _forget_empty(self, user_id: str) -> None:
        if user_id in self._waiting and not self._waiting[user_id]:
            del self._waiting[user_id]

    def _retry_after(self, before: int) -> int:
        return min(60, max(1, math.ceil(self._mean_hold_s * (before + 1) / self.per_user)))


@contextlib.asynccontextmanager
async def served(ticket: Ticket, engine: Engine) -> AsyncIterator[list[Reservation]]:
    """The request's places in the engine; whoever did not use them gives them back here."""
    try:
        places = await ticket.places(engine)
        try:
            yield places
        finally:
            for place in places:
                place.release()
    finally:
        ticket.leave()

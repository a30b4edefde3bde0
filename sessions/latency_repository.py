"""The part of the repository that is about how long turns took."""

from __future__ import annotations

from datetime import datetime

from sessions.database import Database
from sessions.latency_records import LatencyReport, TurnRecord
from sessions.queries import latencies, latency_sums
from sessions.records import TurnLatency


class LatencyRepository:
    """Base of `Repository`. What it reads was written in the transactions that end turns."""

    _database: Database

    async def chat_latency(self, chat_id: str) -> list[TurnLatency]:
        """All of a chat's records, oldest first, those of other branches included."""
        async with self._database.read() as db:
            return await latencies.of_chat(db, chat_id)

    async def number_of_turns(self, chat_id: str) -> int:
        async with self._database.read() as db:
            return await latencies.number_of_turns(db, chat_id)

    async def chat_turns(self, chat_id: str, *, first: int, limit: int) -> list[TurnRecord]:
        """A chat's turns from number `first` on (0 is the oldest), with those still running."""
        async with self._database.read() as db:
            return await latencies.page_of_chat(db, chat_id, first=first, limit=limit)

    async def turns_since(
        self, begun: datetime, *, after: TurnRecord | None = None, limit: int = 1000
    ) -> list[TurnRecord]:
        """All users' turns that began from a time on, oldest first; `after` the last one known."""
        place = None if after is None else (after.created_at, after.turn_id)
        async with self._database.read() as db:
            return await latencies.since(db, begun, place, limit)

    async def latency_report(
        self, *, level: int, since: int | None, step: int | None
    ) -> LatencyReport:
        """Sums and histograms over all users' turns, without looking at one of them.

        `level` is the length in seconds of the intervals to read: `FINE_S`, `HOUR_S` or `DAY_S`
        of `sessions.queries.latency_sums`, of which the first two are kept for a while only.
        `since` is seconds since 1970 (None: ever, by days or weeks), `step` a multiple of `level`
        (None: as coarse as it takes for a chart).
        """
        async with self._database.read() as db:
            return await latency_sums.report(db, level=level, since=since, step=step)

"""Sums and histograms over all users' turns: kept as turns end, read by range of time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Label, Select, delete, func, select, text
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from sessions import models
from sessions.latency_histogram import bucket_of
from sessions.latency_records import (
    MEASURES,
    IntervalCounts,
    IntervalSums,
    LatencyReport,
    LatencySums,
    Measure,
    kind_of,
)
from sessions.models.turns import LatencyCount, LatencySum
from sessions.records import EndStatus, Latency

FINE_S, HOUR_S, DAY_S, WEEK_S = 300, 3600, 86_400, 604_800
KEPT_S = {FINE_S: 2 * DAY_S, HOUR_S: 60 * DAY_S}  # longer ones are kept for ever
MAX_STEPS = 60  # of the range that has no beginning

_SUMS = tuple(field.name for field in fields(LatencySums))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTurn:
    """What is counted of a turn."""

    created_at: datetime
    outcome: EndStatus
    first_token_ms: float | None
    latency: Latency | None


async def add(db: AsyncConnection, ended: Sequence[EndedTurn], now: datetime) -> None:
    """Count turns in, once each: to be called in the transaction that ends them."""
    if not ended:
        return
    sums = [row for turn in ended for row in _sum_rows(turn)]
    insert_sums = upsert(LatencySum)
    await db.execute(
        insert_sums.on_conflict_do_update(
            index_elements=["level", "start", "kind", "method"],
            set_={
                name: getattr(LatencySum, name) + getattr(insert_sums.excluded, name)
                for name in _SUMS
            },
        ),
        sums,
    )
    counts = [row for turn in ended for row in _count_rows(turn)]
    if counts:
        insert_counts = upsert(LatencyCount)
        await db.execute(
            insert_counts.on_conflict_do_update(
                index_elements=["level", "measure", "start", "kind", "bucket"],
                set_={"turns": LatencyCount.turns + insert_counts.excluded.turns},
            ),
            counts,
        )
    for level, kept_s in KEPT_S.items():
        before = int(now.timestamp()) - kept_s
        await db.execute(
            delete(LatencySum).where(LatencySum.level == level, LatencySum.start < before)
        )
        await db.execute(
            delete(LatencyCount).where(
                LatencyCount.level == level,
                LatencyCount.measure.in_(MEASURES),  # leads to the rows by the key
                LatencyCount.start < before,
            )
        )


async def report(
    db: AsyncConnection, *, level: int, since: int | None, step: int | None
) -> LatencyReport:
    """What began from `since` on in steps of `step` seconds.

    Without `since` all there ever was, from days, or from weeks when there are many; without `step`
    at most `MAX_STEPS` of them.
    """
    if since is None:
        ends = select(func.min(LatencySum.start), func.max(LatencySum.start))
        first, last = (await db.execute(ends.where(LatencySum.level == DAY_S))).one()
        level = DAY_S if first is None or last - first <= MAX_STEPS * DAY_S else WEEK_S
        since = (first or 0) // level * level
    if step is None:
        latest = select(func.max(LatencySum.start)).where(LatencySum.level == level)
        number = ((await db.scalar(latest) or 0) - since) // level + 1
        step = max(1, -(-number // MAX_STEPS)) * level
    sums = [
        IntervalSums(
            start=row["step"],
            kind=row["kind"],
            method=row["method"],
            sums=LatencySums(**{name: row[name] for name in _SUMS}),
        )
        for row in (await db.execute(sums_query(level, since, step))).mappings()
    ]
    counts = [
        IntervalCounts(
            measure=measure,
            start=start,
            kind=kind,
            counts={int(bucket): turns for bucket, turns in json.loads(found).items()},
        )
        for measure, start, kind, found in await db.execute(counts_query(level, since, step))
    ]
    running = await db.scalar(
        select(func.count()).select_from(models.Turn).where(models.Turn.running.is_not(None))
    )
    return LatencyReport(
        since=since,
        step=step,
        sums=sums,
        counts=counts,
        running=running or 0,
    )


def sums_query(level: int, since: int, step: int) -> Select[*tuple[Any, ...]]:
    table = LatencySum
    return (
        select(
            _stepped(table.start, since, step),
            table.kind,
            table.method,
            *(func.sum(getattr(table, name)).label(name) for name in _SUMS),
        )
        .where(table.level == level, table.start >= since)
        .group_by(text("step"), table.kind, table.method)
        .order_by(text("step"))
    )


def counts_query(level: int, since: int, step: int) -> Select[*tuple[Any, ...]]:
    """A row for each histogram, which is JSON: a row for each bucket costs more to fetch."""
    table = LatencyCount
    buckets = (
        select(
            table.measure,
            _stepped(table.start, since, step),
            table.kind,
            table.bucket,
            func.sum(table.turns).label("turns"),
        )
        .where(table.level == level, table.measure.in_(MEASURES), table.start >= since)
        .group_by(table.measure, text("step"), table.kind, table.bucket)
        .subquery("buckets")
    )
    found = buckets.c
    return select(
        found.measure, found.step, found.kind, func.json_group_object(found.bucket, found.turns)
    ).group_by(found.measure, found.step, found.kind)


def _stepped(start: InstrumentedAttribute[int], since: int, step: int) -> Label[int]:
    """The beginning of the step in which an interval lies."""
    return (since + (start - since) // step * step).label("step")


def _sum_rows(turn: EndedTurn) -> list[dict[str, Any]]:
    found = turn.latency
    values: dict[str, Any] = dict.fromkeys(_SUMS, 0)
    if found is not None:
        values |= {name: value for name, value in asdict(found).items() if name in values}
        if found.restored_tokens and found.restore_predicted_ms is not None:
            values["predicted_turns"] = 1
            values["predicted_ms"] = found.restore_predicted_ms
            values["predicted_took_ms"] = found.restore_ms
    values["turns"] = 1
    without = "silent" if turn.outcome == "complete" else turn.outcome
    values["first_tokens" if turn.first_token_ms is not None else without] = 1
    method = "" if found is None else found.restore_method
    return [
        {"level": level, "start": start, "kind": kind_of(found), "method": method, **values}
        for level, start in _intervals(turn.created_at)
    ]


def _count_rows(turn: EndedTurn) -> list[dict[str, Any]]:
    found = turn.latency
    measured: dict[Measure, float | None] = {"first_token": turn.first_token_ms}
    if found is not None:
        measured |= {"between": found.itl_p50_ms, "queue": found.queue_ms}
        if found.restored_tokens:
            measured["restore"] = found.restore_ms
            if found.restore_predicted_ms:
                measured["prediction"] = found.restore_ms / found.restore_predicted_ms * 100
    return [
        {
            "level": level,
            "measure": measure,
            "start": start,
            "kind": kind_of(found),
            "bucket": bucket_of(value),
            "turns": 1,
        }
        for level, start in _intervals(turn.created_at)
        for measure, value in measured.items()
        if value is not None
    ]


def _intervals(at: datetime) -> list[tuple[int, int]]:
    seconds = int(at.timestamp())
    return [(level, seconds // level * level) for level in (FINE_S, HOUR_S, DAY_S, WEEK_S)]

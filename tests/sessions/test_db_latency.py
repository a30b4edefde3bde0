"""Sums and histograms of latency, against the plain figures that they stand for."""

from __future__ import annotations

import dataclasses
import math
import random
import sqlite3
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import NullPool

from sessions import migrate
from sessions.database import Database
from sessions.latency_histogram import LAST_BUCKET, MAX_ERROR, bucket_of, percentile, upper_bound
from sessions.latency_records import LatencySums
from sessions.queries import latencies, latency_sums
from sessions.queries.latency_sums import DAY_S, FINE_S, HOUR_S, WEEK_S
from sessions.records import EndStatus, Latency
from sessions.repository import Repository
from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 3, 31, 12, 0, tzinfo=UTC)


SUMMED = (
    "tokens_in",
    "tokens_out",
    "prefix_tokens",
    "prefix_restored_tokens",
    "prefix_computed_tokens",
    "resident_tokens",
    "restored_tokens",
    "recomputed_tokens",
    "new_tokens",
    "prefill_ms",
    "restore_ms",
    "restore_io_ms",
    "restore_compute_ms",
    "restore_bytes",
    "preemptions",
)


class SetClock:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at


@pytest.fixture
def clock(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> SetClock:
    clock = SetClock()
    monkeypatch.setattr(repository, "_clock", clock)
    return clock


def random_latency(rng: random.Random) -> Latency:
    kind = rng.choice(["first", "resident", "restored", "recomputed"])
    restored = rng.randrange(1, 3000) if kind == "restored" else 0
    ttft = rng.lognormvariate(5, 1)
    return Latency(
        queue_ms=rng.choice([0.0, rng.lognormvariate(1, 1)]),
        restore_ms=rng.lognormvariate(4, 1) if restored else 0.0,
        restore_io_ms=rng.random() * 20,
        restore_compute_ms=rng.random() * 20,
        restore_method=rng.choice(["kv", "hidden+kv"]) if restored else "",
        restore_bytes=restored * 1536,
        prefill_ms=rng.random() * 100,
        ttft_ms=ttft,
        itl_p50_ms=rng.choice([None, rng.lognormvariate(3, 0.5)]),
        itl_p95_ms=None,
        total_ms=ttft + 500,
        tokens_in=100 + restored,
        tokens_out=rng.randrange(1, 200),
        prefix_tokens=rng.randrange(1000),
        resident_tokens=rng.randrange(1, 100) if kind == "resident" else 0,
        restored_tokens=restored,
        recomputed_tokens=rng.randrange(1, 100) if kind in ("recomputed", "restored") else 0,
        new_tokens=rng.randrange(1, 50),
        batch_size=1.0,
        prefix_computed_tokens=rng.randrange(10),
        preemptions=rng.randrange(2),
        restore_predicted_ms=rng.choice([None, rng.lognormvariate(4, 1)]) if restored else None,
        restore_spans=[["read", 0.5, 7.0, 64, 30]] if restored else [],
        server_ttft_ms=ttft + 4,
    )


@dataclasses.dataclass(frozen=True)
class Ended:
    """A turn as a plain record."""

    at: datetime
    outcome: EndStatus
    first_token_ms: float | None
    latency: Latency | None


async def end_turns(
    repository: Repository, chats: Chats, clock: SetClock, number: int, seed: int = 1
) -> list[Ended]:
    """Turns of all sorts over three days, the oldest first."""
    rng = random.Random(seed)
    ended = []
    for n in range(number):
        clock.at = NOW - timedelta(seconds=(number - n) * 3 * DAY_S / number)
        turn = await chats.start(f"turn {n}")
        outcome: EndStatus = rng.choice(
            ["complete", "complete", "stopped", "failed", "interrupted"]
        )
        latency = random_latency(rng) if outcome in ("complete", "stopped") else None
        first = rng.choice([None, 80.0]) if latency is None else latency.server_ttft_ms
        if outcome == "stopped" and rng.random() < 0.5:
            assert latency is not None
            latency = dataclasses.replace(
                latency, ttft_ms=None, server_ttft_ms=None, tokens_out=0, itl_p50_ms=None
            )
            first = None
        await repository.finish_turn(
            turn.id,
            status=outcome,
            finish_reason=None,
            error=None,
            text="",
            token_ids=[],
            latency=latency,
            first_token_ms=first,
        )
        ended.append(Ended(turn.created_at, outcome, first, latency))
    clock.at = NOW
    return ended


def plain_sums(ended: list[Ended]) -> LatencySums:
    measured = [one.latency for one in ended if one.latency is not None]
    without = Counter(one.outcome for one in ended if one.first_token_ms is None)
    predicted = [
        one for one in measured if one.restored_tokens and one.restore_predicted_ms is not None
    ]
    summed = {name: sum(getattr(one, name) for one in measured) for name in SUMMED}
    return LatencySums(
        turns=len(ended),
        first_tokens=sum(one.first_token_ms is not None for one in ended),
        stopped=without["stopped"],
        failed=without["failed"],
        interrupted=without["interrupted"],
        silent=without["complete"],
        predicted_turns=len(predicted),
        predicted_ms=sum(one.restore_predicted_ms or 0.0 for one in predicted),
        predicted_took_ms=sum(one.restore_ms for one in predicted),
        **summed,
    )


def rank(values: list[float], percent: float) -> float:
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


def total(report: Any) -> dict[str, float]:
    names = [field.name for field in dataclasses.fields(LatencySums)]
    return {name: sum(getattr(one.sums, name) for one in report.sums) for name in names}


def counted(report: Any, measure: str) -> dict[int, int]:
    found: Counter[int] = Counter()
    for one in report.counts:
        if one.measure == measure:
            found.update(one.counts)
    return dict(found)


@settings(deadline=None)
@given(st.lists(st.floats(0.011, 1e9), min_size=1), st.sampled_from([1, 50, 90, 99, 100]))
async def test_percentiles_are_within_the_stated_error(values: list[float], percent: int) -> None:
    estimate = percentile(Counter(map(bucket_of, values)), percent)
    assert estimate == pytest.approx(rank(values, percent), rel=MAX_ERROR * 1.001)


async def test_buckets_hold_what_they_say() -> None:
    for bucket in range(1, LAST_BUCKET):
        bound = upper_bound(bucket)
        assert bucket_of(bound * 0.9999) == bucket
        assert bucket_of(bound * 1.0001) == bucket + 1
    assert (bucket_of(0.0), bucket_of(-1.0), bucket_of(1e300)) == (0, 0, LAST_BUCKET)
    assert percentile({}, 50) is None


async def test_sums_are_those_of_the_turns(
    repository: Repository, chats: Chats, clock: SetClock
) -> None:
    ended = await end_turns(repository, chats, clock, 60)
    for level, step, length in (
        (FINE_S, FINE_S, DAY_S),
        (HOUR_S, 4 * HOUR_S, 2 * DAY_S),
        (DAY_S, None, None),
    ):
        since = None if length is None else (int(NOW.timestamp()) - length) // level * level
        report = await repository.latency_report(level=level, since=since, step=step)
        within = [one for one in ended if since is None or one.at.timestamp() >= since]
        expected = dataclasses.asdict(plain_sums(within))
        assert total(report) == pytest.approx(expected), level
        measured = [one.latency for one in within if one.latency is not None]
        plain: dict[str, list[float | None]] = {
            "first_token": [one.first_token_ms for one in within],
            "between": [one.itl_p50_ms for one in measured],
            "queue": [one.queue_ms for one in measured],
        }
        for measure, values in plain.items():
            known = [value for value in values if value is not None]
            assert counted(report, measure) == Counter(map(bucket_of, known)), (level, measure)
        if step is not None:
            assert {(one.start - report.since) % step for one in report.sums} == {0}
        for one in report.sums:
            reasons = one.sums.stopped + one.sums.failed + one.sums.interrupted + one.sums.silent
            assert one.sums.turns == one.sums.first_tokens + reasons


async def test_a_crash_is_counted_once_and_running_turns_apart(
    repository: Repository, chats: Chats
) -> None:
    await chats.answer(await chats.start("one"))
    await chats.start("two")
    report = await repository.latency_report(level=DAY_S, since=None, step=None)
    assert (total(report)["turns"], report.running) == (1, 1)
    assert len(await repository.interrupt_running()) == 1
    assert await repository.interrupt_running() == []
    report = await repository.latency_report(level=DAY_S, since=None, step=None)
    found = total(report)
    assert (found["turns"], found["interrupted"], report.running) == (2, 1, 0)
    assert found["silent"] == 1


async def test_short_intervals_do_not_pile_up(
    repository: Repository, chats: Chats, clock: SetClock, db_path: Path
) -> None:
    await end_turns(repository, chats, clock, 40)
    await chats.answer(await chats.start("now"))
    with closing(sqlite3.connect(db_path)) as db:
        for table in ("latency_sum", "latency_count"):
            oldest = dict(db.execute(f"SELECT level, MIN(start) FROM {table} GROUP BY level"))
            assert oldest[FINE_S] >= NOW.timestamp() - 2 * DAY_S - FINE_S
            assert oldest[DAY_S] <= NOW.timestamp() - 2 * DAY_S
    clock.at = NOW + timedelta(days=100)
    await chats.answer(await chats.start("later"))
    with closing(sqlite3.connect(db_path)) as db:
        counted = dict(db.execute("SELECT level, SUM(turns) FROM latency_sum GROUP BY level"))
    assert counted == {FINE_S: 1, HOUR_S: 1, DAY_S: 42, WEEK_S: 42}
    # Over more days than a chart has points, weeks are read; nothing is lost or counted twice.
    report = await repository.latency_report(level=DAY_S, since=None, step=None)
    assert (total(report)["turns"], report.step) == (42, WEEK_S)


async def test_a_chats_turns_are_paged_with_their_spans(
    repository: Repository, chats: Chats, clock: SetClock
) -> None:
    turn = await chats.start()
    latency = random_latency(random.Random(3))
    await repository.finish_turn(
        turn.id, status="complete", finish_reason="eos", error=None, text="", token_ids=[],
        latency=latency,
    )  # fmt: skip
    clock.at += timedelta(seconds=1)
    running = await chats.ask(turn.chat_id, turn.message_id)
    assert await repository.number_of_turns(turn.chat_id) == 2
    first, second = await repository.chat_turns(turn.chat_id, first=0, limit=9)
    assert first.latency == latency
    assert (first.first_token_ms, first.without_first_token) == (latency.server_ttft_ms, "")
    assert (second.turn_id, second.outcome, second.latency) == (running.id, None, None)
    assert second.without_first_token == "still running"
    assert await repository.chat_turns(turn.chat_id, first=1, limit=1) == [second]
    assert await repository.turns_since(NOW, limit=1) == [first]
    assert await repository.turns_since(NOW, after=first) == [second]
    assert await repository.turns_since(clock.at) == [second]


TABLES = (
    "user", "assistant", "assistant_version", "prefix", "chat", "message", "turn", "turn_latency"
)  # fmt: skip


def _at_0007(path: Path) -> None:
    """A database as it was before."""
    db_engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)

    @event.listens_for(db_engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA foreign_keys = OFF")

    config = migrate._config()
    with db_engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0007")
    db_engine.dispose()


async def test_old_turns_are_summed_up_by_the_upgrade_as_new_ones_are(
    repository: Repository, chats: Chats, db_path: Path, tmp_path: Path
) -> None:
    """The same rows, counted as they ended and by the migration, give the same tables."""
    rng = random.Random(5)
    for number in range(40):
        turn = await chats.start(f"turn {number}")
        outcome: EndStatus = rng.choice(["complete", "complete", "stopped", "failed"])
        latency = None if outcome == "failed" else random_latency(rng)
        if latency is not None and number % 5 == 0:
            latency = dataclasses.replace(latency, ttft_ms=None, server_ttft_ms=None)
        await repository.finish_turn(
            turn.id, status=outcome, finish_reason=None, error=None, text="", token_ids=[],
            latency=latency,
        )  # fmt: skip
    await chats.start("runs on")
    old = tmp_path / "old.db"
    _at_0007(old)
    with closing(sqlite3.connect(old)) as db:
        db.execute("ATTACH ? AS new", (str(db_path),))
        for table in TABLES:
            columns = [row[1] for row in db.execute(f"PRAGMA table_info('{table}')")]
            names = ", ".join(f'"{name}"' for name in columns)
            db.execute(f'INSERT INTO main."{table}" ({names}) SELECT {names} FROM new."{table}"')
        db.commit()
    migrate.upgrade(old, tmp_path / "backups")
    with closing(sqlite3.connect(db_path)) as new, closing(sqlite3.connect(old)) as upgraded:
        for table, keys in (("latency_sum", 4), ("latency_count", 5)):
            query = f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4, 5"
            kept, rebuilt = new.execute(query).fetchall(), upgraded.execute(query).fetchall()
            assert len(kept) > 10
            assert [row[:keys] for row in kept] == [row[:keys] for row in rebuilt]
            for one, other in zip(kept, rebuilt, strict=True):
                assert one[keys:] == pytest.approx(other[keys:]), one[:keys]
        query = "SELECT id, outcome, first_token_ms FROM turn ORDER BY id"
        assert new.execute(query).fetchall() == upgraded.execute(query).fetchall()


async def test_no_page_reads_all_turns(
    database: Database, repository: Repository, chats: Chats, db_path: Path
) -> None:
    turn = await chats.start()
    await chats.answer(turn)
    fill(db_path, 20_000)
    place = (NOW - timedelta(days=30), "f")
    queries = {
        "a page of a chat": latencies.chat_query(turn.chat_id, first=19_000, limit=50),
        "a download": latencies.since_query(NOW - timedelta(days=1), after=None, limit=500),
        "its next part": latencies.since_query(NOW, after=place, limit=500),
        "sums": latency_sums.sums_query(DAY_S, 0, DAY_S),
        "histograms": latency_sums.counts_query(DAY_S, 0, DAY_S),
    }
    with closing(sqlite3.connect(db_path)) as db:
        for name, query in queries.items():
            compiled = query.compile(
                dialect=sqlite.dialect(), compile_kwargs={"render_postcompile": True}
            )
            dialect_types = compiled.positiontup or []
            values = [
                str(compiled.params[key])
                if isinstance(compiled.params[key], datetime)
                else compiled.params[key]
                for key in dialect_types
            ]
            plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {compiled}", values)]
            assert not [line for line in plan if line.startswith(("SCAN turn", "SCAN latency"))], (
                name,
                plan,
            )
            assert any("INDEX" in line or "PRIMARY KEY" in line for line in plan), (name, plan)
    [first, *_] = await repository.chat_turns(turn.chat_id, first=19_990, limit=50)
    assert first.chat_id == turn.chat_id


def fill(db_path: Path, number: int) -> None:
    """Copies of the only turn, a minute apart, the latest ones first, with a measured record."""
    with closing(sqlite3.connect(db_path)) as db, db:
        turn = [row[1] for row in db.execute("PRAGMA table_info(turn)")]
        changed = {
            "id": "printf('%032x', n)",
            "created_at": "strftime('%Y-%m-%d %H:%M:%f000', '2026-03-31', '-' || n || ' minutes')",
        }
        columns = ", ".join(changed.get(name, f'turn."{name}"') for name in turn)
        numbers = (
            f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers"
            f" WHERE n < {number})"
        )
        db.execute(
            f"{numbers} INSERT INTO turn"
            f" SELECT {columns} FROM numbers, (SELECT * FROM turn) AS turn"
        )
        latency = [row[1:3] for row in db.execute("PRAGMA table_info(turn_latency)")]
        values = ", ".join(
            "printf('%032x', n)" if name == "turn_id" else "'[]'" if kind in ("JSON",) else "7"
            for name, kind in latency
        )
        db.execute(f"{numbers} INSERT INTO turn_latency SELECT {values} FROM numbers")
        db.execute("ANALYZE")

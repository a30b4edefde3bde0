"""How long the server works for a latency page when there are very many turns.

A database of the time before latency was summed up is filled with a million turns over two years
(20,000 with `--quick`), a thousand of them of one chat, and upgraded; then the real application is
asked for each page, with the embedded engine behind it. `cpu_ms` is the processor time of the web
process, its client included; `wall_ms` is what the client waited. Medians.

`slowest_cpu_ms` is the one that must stay below 500; `plans` says how SQLite reads each page's
rows.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from alembic import command
from sqlalchemy import Select, create_engine
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import NullPool

from app.main import create_app
from app.security.login import LOGIN_COOKIE, hash_token
from app.settings import load_settings
from benchmarks import machine
from benchmarks.report import Options, Refused, Row, progress, run
from sessions import migrate
from sessions.queries import latencies, latency_sums
from sessions.queries.latency_sums import DAY_S

LIMIT_MS = 500.0
REPEATS = 7
OF_ONE_CHAT = 1000
CHAT, OTHER, MESSAGE = "c" * 32, "d" * 32, "e" * 32
# What varies from turn to turn; the rest of the numbers is the same for all.
VARIED = {
    "queue_ms": "abs(random()) % 500 / 50.0",
    "restore_ms": "CASE WHEN n % 3 = 0 THEN 5 + abs(random()) % 20000 / 100.0 ELSE 0 END",
    "restore_predicted_ms": "CASE WHEN n % 3 = 0 THEN 60.0 END",
    "restore_method": "CASE WHEN n % 3 = 0 THEN 'kv' ELSE '' END",
    "restore_plan": "CASE WHEN n % 3 = 0 THEN '30 kv' ELSE '' END",
    "restored_tokens": "CASE WHEN n % 3 = 0 THEN 900 ELSE 0 END",
    "resident_tokens": "CASE WHEN n % 3 = 1 THEN 900 ELSE 0 END",
    "server_ttft_ms": "20 + abs(random()) % 200000 / 100.0",
    "ttft_ms": "20 + abs(random()) % 200000 / 100.0",
    "itl_p50_ms": "10 + abs(random()) % 10000 / 200.0",
    "total_ms": "2500.0",
}


def measure(options: Options) -> Row:
    number = 20_000 if options.quick else 1_000_000
    with tempfile.TemporaryDirectory(prefix="rejoinder-pages-") as directory:
        data = Path(directory)
        path = data / "rejoinder.db"
        _fill(path, number)
        begun = time.monotonic()
        migrate.upgrade(path, data / "backups", progress)
        upgrade_s = time.monotonic() - begun
        rows = asyncio.run(_ask(data, options))
        plans = _plans(path)
    slowest = max(row["cpu_ms"] for row in rows)
    if slowest > LIMIT_MS:
        progress(f"slower than {LIMIT_MS:g} ms: {slowest:.0f} ms")
    return {
        "turns": number,
        "upgrade_s": upgrade_s,
        "slowest_cpu_ms": slowest,
        "rows": rows,
        "plans": plans,
        "machine": machine.describe(),
    }


def _fill(path: Path, number: int) -> None:
    """A database of schema 0007 with that many turns."""
    progress(f"writing {number:,} turns")
    db_engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)
    config = migrate._config()
    with db_engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0007")
    db_engine.dispose()
    now = datetime.now(UTC)
    step_s = 2 * 365 * DAY_S / number
    ago = f"-(n * {step_s}) || ' seconds'"
    moment = f"strftime('%Y-%m-%d %H:%M:%f000', '{now:%Y-%m-%d %H:%M:%S}', {ago})"
    every = number // OF_ONE_CHAT
    numbers = (
        "WITH RECURSIVE numbers(n) AS"
        f" (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < {number - 1})"
    )
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA synchronous = OFF")
        ids = {"chat_id": CHAT, "user_message_id": MESSAGE, "message_id": MESSAGE}
        _insert(db, "user", id="u" * 32)
        _insert(db, "assistant", id="a" * 32, sampling="{}", published=1)
        _insert(db, "assistant_version", id="v" * 32, assistant_id="a" * 32)
        _insert(db, "prefix", id="p" * 32, assistant_version_id="v" * 32)
        for chat in (CHAT, OTHER):
            _insert(db, "chat", id=chat, user_id="u" * 32, prefix_id="p" * 32, title="A chat")
        _insert(db, "message", id=MESSAGE, chat_id=CHAT, role="assistant", status="complete")
        varied = {
            "id": "printf('%032x', n)",
            # The chat's turns are spread over the whole time, as those of others are.
            "chat_id": f"CASE WHEN n % {every} = 0 THEN '{CHAT}' ELSE '{OTHER}' END",
            "created_at": moment,
            "ended_at": moment,
        }
        _insert_many(db, "turn", numbers, {**varied}, ids | {"sampling": "{}"})
        _insert_many(db, "turn_latency", numbers, {"turn_id": varied["id"], **VARIED}, {})


def _insert(db: sqlite3.Connection, table: str, **given: object) -> None:
    """One row; columns that must have a value and are not given one get the smallest."""
    columns = db.execute(f"PRAGMA table_info('{table}')").fetchall()
    values: dict[str, object] = {}
    for _, name, kind, needed, default, _ in columns:
        if name in given:
            values[name] = given[name]
        elif needed and default is None:
            values[name] = _smallest(kind)
    names = ", ".join(f'"{name}"' for name in values)
    marks = ", ".join("?" * len(values))
    db.execute(f'INSERT INTO "{table}" ({names}) VALUES ({marks})', list(values.values()))


def _insert_many(
    db: sqlite3.Connection, table: str, numbers: str, varied: dict[str, str], same: dict[str, str]
) -> None:
    columns = db.execute(f"PRAGMA table_info('{table}')").fetchall()
    values = {}
    for _, name, kind, needed, default, _ in columns:
        if name in varied:
            values[name] = varied[name]
        elif name in same:
            values[name] = f"'{same[name]}'"
        elif needed and default is None:
            values[name] = "7" if "INT" in kind or "DOUBLE" in kind else "''"
    names = ", ".join(values)
    db.execute(
        f"{numbers} INSERT INTO {table} ({names}) SELECT {', '.join(values.values())} FROM numbers"
    )


def _smallest(kind: str) -> object:
    if "INT" in kind or "BOOL" in kind or "DOUBLE" in kind:
        return 0
    return b"" if "BLOB" in kind else "2026-01-01 00:00:00.000000" if "DATE" in kind else ""


async def _ask(data: Path, options: Options) -> list[Row]:
    given = {"data_dir": str(data), "model": str(options.model_dir), "checkpoint_cap_mib": "0"}
    given["dtype"] = "fp32"  # nothing is measured before the engine can serve
    app = create_app(load_settings(given))
    token = secrets.token_urlsafe(32)
    rows = []
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type] # Litestar has types of its own
    async with (
        app.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        user = await app.state.repository.create_user(hash_token(token))
        with closing(sqlite3.connect(data / "rejoinder.db", timeout=30)) as db, db:
            db.execute("UPDATE chat SET user_id = ? WHERE id = ?", (user.id, CHAT))
        headers = {"Cookie": f"{LOGIN_COOKIE}={token}"}
        paths = [f"/chats/{CHAT}/latency", f"/chats/{CHAT}/latency?page=20"]
        paths += [f"/chats/{CHAT}/latency.json"]
        paths += [f"/latency?span={span}" for span in ("hour", "day", "week", "month", "all")]
        paths += ["/latency.json?span=all", "/operator"]
        for path in paths:
            cpu, wall, size = [], [], 0
            for _ in range(REPEATS):
                cpu_at, wall_at = time.process_time(), time.perf_counter()
                response = await client.get(path, headers=headers)
                cpu.append((time.process_time() - cpu_at) * 1e3)
                wall.append((time.perf_counter() - wall_at) * 1e3)
                size = len(response.content)
                if response.status_code != 200:
                    raise Refused(f"{path} was answered with {response.status_code}")
            row: Row = {"page": path.replace(CHAT, "ID"), "bytes": size}
            row |= {"cpu_ms": statistics.median(cpu), "wall_ms": statistics.median(wall)}
            rows.append(row)
            progress(f"{row['page']}: {row['cpu_ms']:.0f} ms of processor, {size:,} bytes")
    return rows


def _plans(path: Path) -> dict[str, list[str]]:
    """How SQLite finds the rows of each query. Refused when it would read all turns."""
    now = datetime.now(UTC)
    queries: dict[str, Select[Any]] = {
        "turns of a chat": latencies.chat_query(CHAT, first=900, limit=50),
        "download": latencies.since_query(now - timedelta(days=30), after=None, limit=500),
        "sums": latency_sums.sums_query(DAY_S, 0, 7 * DAY_S),
        "histograms": latency_sums.counts_query(DAY_S, 0, 7 * DAY_S),
    }
    plans = {}
    with closing(sqlite3.connect(path)) as db:
        for name, query in queries.items():
            compiled = query.compile(
                dialect=sqlite.dialect(), compile_kwargs={"render_postcompile": True}
            )
            values = [compiled.params[key] for key in compiled.positiontup or ()]
            given = [str(one) if isinstance(one, datetime) else one for one in values]
            plans[name] = [r[3] for r in db.execute(f"EXPLAIN QUERY PLAN {compiled}", given)]
            for line in plans[name]:
                progress(f"{name}: {line}")
                if line.startswith(("SCAN turn", "SCAN latency")):
                    raise Refused(f"{name} reads everything: {line}")
    return plans


if __name__ == "__main__":
    sys.exit(run("pages", __doc__, measure, None))

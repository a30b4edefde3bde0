"""The writer queue: no lost or half-done transaction, no "database is locked"."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.database import Database, Transaction
from sessions.errors import DatabaseClosed, NotStored
from sessions.repository import Repository

pytestmark = pytest.mark.anyio


async def _store(db: AsyncConnection, key: str, value: str = "value") -> str:
    await db.execute(insert(models.Setting).values(key=key, value=value))
    return key


def _storing(key: str, value: str = "value") -> Transaction[str]:
    return lambda db: _store(db, key, value)


async def _keys(database: Database) -> set[str]:
    async with database.read() as db:
        return set(await db.scalars(select(models.Setting.key)))


async def test_pragmas_of_every_connection(database: Database) -> None:
    wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "secure_delete": 1}

    async def found(db: AsyncConnection) -> dict[str, object]:
        return {name: await db.scalar(text(f"PRAGMA {name}")) for name in wanted}

    assert await database.write(found) == wanted
    async with database.read() as db:
        assert await found(db) == wanted
        with pytest.raises(DBAPIError, match="readonly"):
            await _store(db, "a reader does not write")


async def test_many_writers_and_readers(database: Database) -> None:
    stop = asyncio.Event()
    seen: list[int] = []

    async def reader() -> None:
        while not stop.is_set():
            async with database.read() as db:
                first = await db.scalar(select(func.count()).select_from(models.Setting))
                await asyncio.sleep(0.001)
                second = await db.scalar(select(func.count()).select_from(models.Setting))
            assert first is not None
            assert first == second, "one state during a read"
            seen.append(first)

    async def writer(number: int) -> None:
        for step in range(10):
            key = f"{number} {step}"
            assert await database.write(_storing(key)) == key
            async with database.read() as db:
                query = select(models.Setting.key).where(models.Setting.key == key)
                assert await db.scalar(query) == key, "what was awaited can be read"

    readers = [asyncio.create_task(reader()) for _ in range(8)]
    await asyncio.gather(*(writer(number) for number in range(40)))
    stop.set()
    await asyncio.gather(*readers)
    assert len(await _keys(database)) == 400
    assert len(set(seen)) > 1


async def test_a_failure_rolls_back_its_own_transaction_only(database: Database) -> None:
    async def fail(db: AsyncConnection) -> None:
        await _store(db, "of the one that fails")
        raise LookupError("on purpose")

    results = await asyncio.gather(
        database.write(_storing("before")),
        database.write(fail),
        database.write(_storing("before")),  # breaks the primary key
        database.write(_storing("after")),
        return_exceptions=True,
    )
    assert results[0] == "before"
    assert isinstance(results[1], LookupError)
    assert isinstance(results[2], DBAPIError)
    assert results[3] == "after"
    assert await _keys(database) == {"before", "after"}


async def test_lost_transaction_fails_all_that_shared_it(database: Database) -> None:
    async def lose(db: AsyncConnection) -> None:
        await db.exec_driver_sql("ROLLBACK")  # what SQLite does by itself when a disk is full
        raise OSError("the disk is full")

    results = await asyncio.gather(
        database.write(_storing("before")),
        database.write(lose),
        database.write(_storing("after")),
        return_exceptions=True,
    )
    assert all(isinstance(result, Exception) for result in results)
    assert await _keys(database) == set()
    assert await database.write(_storing("next")) == "next"
    assert await _keys(database) == {"next"}


async def test_full_disk_is_reported_and_survived(database: Database) -> None:
    async def limit(db: AsyncConnection, pages: int) -> None:
        await db.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    pages = await database.write(lambda db: db.scalar(text("PRAGMA page_count")))
    await database.write(lambda db: limit(db, pages + 2))
    results = await asyncio.gather(
        database.write(_storing("small")),
        database.write(_storing("large", "x" * 1_000_000)),
        database.write(_storing("small too")),
        return_exceptions=True,
    )
    assert isinstance(results[1], NotStored)
    assert results[1].reason == "database or disk is full"
    assert await _keys(database) == {key for key in results if isinstance(key, str)}
    await database.write(lambda db: limit(db, 1 << 30))
    await database.write(_storing("large", "x" * 1_000_000))
    assert "large" in await _keys(database)


async def test_cancelled_caller_does_not_take_its_transaction_back(database: Database) -> None:
    task = asyncio.create_task(database.write(_storing("kept")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await database.write(_storing("later"))
    assert await _keys(database) == {"kept", "later"}


async def test_close_finishes_what_is_queued(db_path: Path) -> None:
    database = await Database.open(db_path)
    tasks = [asyncio.create_task(database.write(_storing(str(number)))) for number in range(100)]
    await asyncio.sleep(0)
    await database.close()
    await database.close()
    assert [await task for task in tasks] == [str(number) for number in range(100)]
    with pytest.raises(DatabaseClosed):
        await database.write(_storing("too late"))
    assert sorted(item.name for item in db_path.parent.glob("rejoinder.db*")) == [db_path.name]


async def test_write_waits_for_another_process(database: Database, db_path: Path) -> None:
    script = """
        import sqlite3, sys, time
        db = sqlite3.connect(sys.argv[1], isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        print("locked", flush=True)
        time.sleep(1)
        db.execute("INSERT INTO setting VALUES ('theirs', '')")
        db.execute("COMMIT")
        db.close()
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(db_path)], stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        assert await asyncio.to_thread(other.stdout.readline) == b"locked\n"
        started = asyncio.get_running_loop().time()
        keys = [f"ours {number}" for number in range(20)]
        done = asyncio.gather(*(database.write(_storing(key)) for key in keys))
        await asyncio.sleep(0.1)
        assert await _keys(database) == set(), "reading goes on meanwhile"
        await done
        assert asyncio.get_running_loop().time() - started > 0.5
    assert other.returncode == 0
    assert await _keys(database) == {"theirs", *keys}


async def test_awaited_writes_survive_sigkill(db_path: Path) -> None:
    script = """
        import asyncio, sys
        from pathlib import Path
        from sessions.database import Database
        from sessions.repository import Repository

        async def main():
            repository = Repository(await Database.open(Path(sys.argv[1])))
            number = 0
            while True:
                await repository.set_setting(f"key {number}", "value")
                print(number, flush=True)
                number += 1

        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(db_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    with process:
        assert process.stdout is not None
        for _ in range(50):
            assert await asyncio.to_thread(process.stdout.readline)
        process.send_signal(signal.SIGKILL)
        told = 50 + len(process.stdout.read().split(b"\n")) - 1
    database = await Database.open(db_path)
    try:
        repository = Repository(database)
        for number in range(told):
            assert await repository.get_setting(f"key {number}") == "value"
    finally:
        await database.close()


async def test_a_failure_is_told_when_what_it_rests_on_is_committed(database: Database) -> None:
    """Of two that share a commit, the second fails for what the first did, and its caller looks."""

    async def fails_as_the_key_is_there(db: AsyncConnection) -> None:
        assert await db.scalar(text("SELECT count(*) FROM setting WHERE key = 'first'")) == 1
        raise LookupError

    async def look_after_failing() -> set[str]:
        with pytest.raises(LookupError):
            await database.write(fails_as_the_key_is_there)
        return await _keys(database)

    for _ in range(20):
        _, seen = await asyncio.gather(database.write(_storing("first")), look_after_failing())
        assert "first" in seen
        await database.write(lambda db: db.execute(text("DELETE FROM setting")))

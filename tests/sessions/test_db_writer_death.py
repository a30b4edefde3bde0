"""The writer's task or thread fails: its batch is refused, nothing is lost, and it goes on."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

import sessions.database
from sessions import models
from sessions.database import Database
from sessions.errors import DatabaseClosed, NotStored

pytestmark = pytest.mark.anyio


def storing(key: str) -> Callable[[AsyncConnection], Awaitable[Any]]:
    return lambda db: db.execute(insert(models.Setting).values(key=key, value=""))


def keys(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        return {key for (key,) in db.execute("SELECT key FROM setting")}


async def test_a_writer_that_fails_begins_anew(
    database: Database,
    db_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was stored stays, what waited is refused or stored, and the trouble is told."""
    await database.write(storing("before"))

    async def fails(*_: object) -> None:
        raise RuntimeError("the writer's own defect")

    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(database, "_commit", fails)
        broken.setattr(sessions.database, "RESTART_DELAYS_S", (0.0,))
        for _ in range(3):
            with pytest.raises(NotStored, match="RuntimeError"):
                await database.write(storing("refused"))
        assert database.trouble == "the writer failed: RuntimeError"
    assert "writer failed and begins anew" in caplog.text
    assert "the writer's own defect" in caplog.text
    await database.write(storing("after"))
    assert database.trouble == ""
    assert keys(db_path) == {"before", "after"}
    await database.close()
    assert sorted(item.name for item in db_path.parent.glob("rejoinder.db*")) == [db_path.name]


async def test_a_transaction_that_is_cancelled_from_within_does_not_end_the_writer(
    database: Database, db_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions.database, "RESTART_DELAYS_S", (0.0,))

    async def cancelled(_: AsyncConnection) -> None:
        raise asyncio.CancelledError

    results = await asyncio.gather(
        database.write(storing("with it")), database.write(cancelled), return_exceptions=True
    )
    assert [type(one) for one in results] == [NotStored, NotStored]
    await database.write(storing("later"))
    assert keys(db_path) == {"later"}


async def test_the_connection_is_gone(
    database: Database, db_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has ended with it: the writer takes another."""
    monkeypatch.setattr(sessions.database, "RESTART_DELAYS_S", (0.0,))
    await database.write(storing("before"))

    async def close_it(db: AsyncConnection) -> None:
        driver = (await db.get_raw_connection()).driver_connection
        assert isinstance(driver, aiosqlite.Connection)
        await driver.close()

    with pytest.raises(NotStored):
        await database.write(close_it)
    assert database.trouble
    await database.write(storing("after"))
    assert keys(db_path) == {"before", "after"}
    assert database.trouble == ""


async def test_a_writer_that_cannot_begin_anew_still_ends(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing does not wait for ever, and nobody waits for an answer that never comes."""
    monkeypatch.setattr(sessions.database, "RESTART_DELAYS_S", (0.0, 3600.0))

    async def fails(*_: object) -> None:
        raise RuntimeError("again")

    monkeypatch.setattr(database, "_commit", fails)
    for _ in range(2):
        with pytest.raises(NotStored):
            await database.write(storing("refused"))
    waiting = asyncio.create_task(database.write(storing("waits")))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await database.close()
        with pytest.raises((NotStored, DatabaseClosed)):
            await waiting


async def test_what_is_stored_is_told_though_the_log_cannot_be_cut(
    database: Database, db_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions.database, "RESTART_DELAYS_S", (0.0,))

    async def fails(*_: object) -> None:
        raise RuntimeError("no cut")

    with monkeypatch.context() as broken:
        broken.setattr(database, "_truncate_wal", fails)
        await database.write(storing("stored"), truncate_wal=True)
    assert keys(db_path) == {"stored"}
    await database.write(storing("later"))
    assert keys(db_path) == {"stored", "later"}

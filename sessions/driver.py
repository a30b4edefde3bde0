"""aiosqlite, with one visit to its thread for a statement.

SQLAlchemy makes a cursor, executes, fetches and closes: four visits, and each waits for the event
loop's thread and the connection's to be given a core. A page makes some fifteen statements while
the engine has all cores at work.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite

Parameters = Sequence[Any]


class Connection(aiosqlite.Connection):
    """One connection and its thread; used from the event loop that opened it."""

    def cursor(self) -> Cursor:  # type: ignore[override]  # SQLAlchemy enters it
        return Cursor(self)


class Cursor:
    """Runs a statement and has all its rows at once; as much of a cursor as SQLAlchemy asks for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.description: tuple[Any, ...] | None = None
        self.rowcount = -1
        self.lastrowid: int | None = None
        self.arraysize = 1

    async def __aenter__(self) -> Cursor:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def execute(self, sql: str, parameters: Parameters = ()) -> Cursor:
        """Raises what sqlite3 raises."""
        return await self._visit(lambda cursor: cursor.execute(sql, parameters))

    async def executemany(self, sql: str, parameters: Iterable[Parameters]) -> Cursor:
        """Raises what sqlite3 raises."""
        return await self._visit(lambda cursor: cursor.executemany(sql, list(parameters)))

    async def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        """Nothing is open: the statement was finished in its visit."""

    async def _visit(self, run: Callable[[sqlite3.Cursor], sqlite3.Cursor]) -> Cursor:
        # The library leaves it untyped.
        await self._connection._execute(self._run, run)  # type: ignore[no-untyped-call]
        return self

    def _run(self, run: Callable[[sqlite3.Cursor], sqlite3.Cursor]) -> None:
        """In the connection's thread."""
        cursor = self._connection._conn.cursor()
        try:
            run(cursor)
            self.description = cursor.description
            self._rows = cursor.fetchall() if cursor.description else []
            self.rowcount, self.lastrowid = cursor.rowcount, cursor.lastrowid
        finally:
            cursor.close()


def connect(path: str, **options: Any) -> Connection:
    """A connection to be awaited; options are those of `sqlite3.connect`."""
    connection = Connection(partial(sqlite3.connect, Path(path), **options), iter_chunk_size=64)
    connection._thread.daemon = True
    return connection

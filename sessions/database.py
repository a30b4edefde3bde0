"""The application's SQLite database: one writer behind a queue, a small pool of readers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import aiosqlite
from sqlalchemy import URL, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from sessions.driver import connect
from sessions.errors import DatabaseClosed, NotStored
from sessions.migrate import require_current

logger = logging.getLogger(__name__)

T = TypeVar("T")
Transaction = Callable[[AsyncConnection], Awaitable[T]]

NUM_READERS = 4
MAX_BATCH = 32  # transactions that share one commit, and so one fsync
BUSY_TIMEOUT_MS = 30_000  # how long a write waits for another process
SLOW_S = 2.0  # another program that holds the database for longer is told
RESTART_DELAYS_S = (0.1, 1.0, 5.0, 30.0)  # of a writer that failed; the last one repeats
# Cutting the log waits for readers while writers wait for it: briefly, and again later.
TRUNCATE_TIMEOUT_MS = 1_000
TRUNCATE_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Job:
    run: Transaction[Any]
    result: asyncio.Future[Any]
    truncate_wal: bool


class Database:
    """Owns all connections to one database file; used from the event loop that opened it."""

    def __init__(self, path: Path, writer_engine: AsyncEngine, reader_engine: AsyncEngine) -> None:
        self.path = path
        self._writer_engine = writer_engine
        self._reader_engine = reader_engine
        self._jobs: asyncio.Queue[_Job | None] = asyncio.Queue()
        self._closed = False
        self._closing = asyncio.Event()
        self._truncate_due = False
        self._writer: asyncio.Task[None] | None = None
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why the last commit was not stored, or what the present one waits for; "" when well."""
        return self._trouble

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Open a database whose schema is current.

        Raises SchemaOutdated, SchemaTooNew, DatabaseDamaged.
        """
        await asyncio.to_thread(require_current, path)
        database = cls(
            path,
            _engine(path, pool_size=1, begin="BEGIN IMMEDIATE", read_only=False),
            _engine(path, pool_size=NUM_READERS, begin="BEGIN", read_only=True),
        )
        ready = asyncio.get_running_loop().create_future()
        database._writer = asyncio.create_task(database._write_loop(ready), name="database writer")
        try:
            await ready
        except BaseException:
            await database.close()
            raise
        return database

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection that sees one state of the database, that of its first statement."""
        async with self._reader_engine.connect() as db:
            yield db

    async def write(self, run: Transaction[T], *, truncate_wal: bool = False) -> T:
        """Run one transaction in the writer; returns its result once that is durable.

        What `run` raises rolls back this transaction alone and is raised here. It may share its
        commit with others, so it neither commits nor rolls back. With `truncate_wal` deleted
        content is gone from the write-ahead log too. Once queued it runs, even when the caller
        is cancelled. Raises DatabaseClosed, and NotStored when the disk is full or fails or another
        process holds the database for too long.
        """
        if self._closed:
            raise DatabaseClosed(f"{self.path} is closed")
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(_Job(run, result, truncate_wal))
        try:
            return await asyncio.shield(result)
        except OperationalError as error:
            logger.error("a transaction was not stored: %s", error.orig)
            raise NotStored(str(error.orig)) from error

    async def close(self) -> None:
        """Finish what is queued and close every connection; calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._closing.set()
            self._jobs.put_nowait(None)
        if self._writer is not None:
            await asyncio.wait([self._writer])
        # The readers go first: the last connection to close checkpoints and removes the log.
        await self._reader_engine.dispose()
        await self._writer_engine.dispose()

    async def _write_loop(self, ready: asyncio.Future[None]) -> None:
        """Commit until the end; a failure costs its batch, and a new connection goes on."""
        failures = 0
        batch: list[_Job] = []
        try:
            while True:
                try:
                    async with self._writer_engine.connect() as db:
                        if not ready.done():
                            ready.set_result(None)
                        while batch := await self._next_batch():
                            await self._commit(db, batch)
                            failures = 0
                        if self._truncate_due:
                            await self._truncate_wal(db)
                        return
                except (Exception, asyncio.CancelledError) as error:
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise
                    if not ready.done():
                        ready.set_exception(error)
                        return
                    self._trouble = f"the writer failed: {type(error).__name__}"
                    logger.exception("the database's writer failed and begins anew")
                    for job in batch:
                        _fail(job, NotStored(self._trouble))
                    batch = []
                    if self._closed:
                        return
                delay = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)]
                failures += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._closing.wait()
        finally:
            self._closed = True
            while not self._jobs.empty():
                left = self._jobs.get_nowait()
                if left is not None:
                    batch.append(left)
            for job in batch:
                _fail(job, DatabaseClosed(f"{self.path} was closed before the commit"))

    async def _next_batch(self) -> list[_Job]:
        """Waits for a transaction and takes those that queued up behind it; empty at the end."""
        batch: list[_Job] = []
        while not batch or (len(batch) < MAX_BATCH and not self._jobs.empty()):
            job = await self._jobs.get()
            if job is None:
                self._jobs.put_nowait(None)  # the end stays in the queue for the next call
                break
            batch.append(job)
        return batch

    async def _commit(self, db: AsyncConnection, batch: list[_Job]) -> None:
        """Run transactions under one commit; whatever happens, each gets its result or error."""
        results: list[tuple[_Job, Any]] = []
        failures: list[tuple[_Job, Exception]] = []
        refusal: OperationalError | None = None  # what SQLite said before its savepoint was gone
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._note_wait, len(batch))
        try:
            async with db.begin():
                slow.cancel()
                for job in batch:
                    try:
                        async with db.begin_nested():
                            try:
                                value = await job.run(db)
                            except OperationalError as error:
                                refusal = error
                                raise
                    except Exception as error:
                        # A full disk, say, ends the whole transaction, not only the savepoint.
                        if not (await _driver(db)).in_transaction:
                            raise
                        refusal = None
                        failures.append((job, error))
                    else:
                        results.append((job, value))
        except Exception as error:
            logger.exception("a database commit of %d transactions failed", len(batch))
            self._trouble = _reason(refusal or error)
            for job in batch:
                _fail(job, NotStored(self._trouble))
            return
        finally:
            slow.cancel()
        refused = [error for _, error in failures if isinstance(error, OperationalError)]
        self._trouble = _reason(refused[0]) if refused else ""
        # Not before the commit: what made one fail may be the other's work, to be seen by then.
        for job, failure in failures:
            _fail(job, failure)
        try:
            if self._truncate_due or any(job.truncate_wal for job, _ in results):
                await self._truncate_wal(db)
        finally:  # whatever becomes of the log, these are stored
            for job, value in results:
                if not job.result.done():
                    job.result.set_result(value)

    def _note_wait(self, transactions: int) -> None:
        self._trouble = "another program holds the database"
        logger.warning(
            "another program has been holding the database for %g s; %d transactions wait for it",
            SLOW_S,
            transactions,
        )

    async def _truncate_wal(self, db: AsyncConnection) -> None:
        """Move the log into the database and cut it; tried again later while a reader holds it."""
        self._truncate_due = True
        connection = await _driver(db)
        try:
            await connection.execute(f"PRAGMA busy_timeout = {TRUNCATE_TIMEOUT_MS}")
            async with connection.execute("PRAGMA wal_checkpoint(TRUNCATE)") as cursor:
                row = await cursor.fetchone()
            await connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        except aiosqlite.Error as error:
            reason = str(error)
        else:
            self._truncate_due, reason = row is None or bool(row[0]), "a reader holds it"
        if self._truncate_due and not self._closed:
            logger.warning("the write-ahead log could not be cut yet: %s", reason)
            result = asyncio.get_running_loop().create_future()
            retry = _Job(_nothing, result, truncate_wal=True)
            asyncio.get_running_loop().call_later(TRUNCATE_RETRY_S, self._jobs.put_nowait, retry)


async def _driver(db: AsyncConnection) -> aiosqlite.Connection:
    return cast(aiosqlite.Connection, (await db.get_raw_connection()).driver_connection)


def _reason(error: Exception) -> str:
    """What kept a transaction from being stored, without a word of what it was to store."""
    return str(error.orig) if isinstance(error, OperationalError) else type(error).__name__


async def _nothing(_: AsyncConnection) -> None:
    return None


def _fail(job: _Job, error: BaseException) -> None:
    if not job.result.done():
        job.result.set_exception(error)
        job.result.exception()  # seen: the caller may have been cancelled


def _engine(path: Path, *, pool_size: int, begin: str, read_only: bool) -> AsyncEngine:
    db_engine = create_async_engine(
        URL.create("sqlite+aiosqlite", database=str(path)),
        pool_size=pool_size,
        max_overflow=0,
        hide_parameters=True,  # they are private texts, and errors get logged
        # The driver's own transaction handling is off: BEGIN is ours, so that it can be IMMEDIATE.
        connect_args={
            "async_creator_fn": connect,
            "isolation_level": None,
            "timeout": BUSY_TIMEOUT_MS / 1000,
        },
    )

    @event.listens_for(db_engine.sync_engine, "connect")
    def configure(connection: DBAPIConnection, _: Any) -> None:
        cursor = connection.cursor()
        try:
            for pragma in (
                "journal_mode = WAL",
                "synchronous = FULL",
                "foreign_keys = ON",
                "secure_delete = ON",
                "temp_store = MEMORY",
                f"query_only = {'ON' if read_only else 'OFF'}",
            ):
                cursor.execute(f"PRAGMA {pragma}")
        finally:
            cursor.close()

    @event.listens_for(db_engine.sync_engine, "begin")
    def start_transaction(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return db_engine

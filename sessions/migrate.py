"""The database's schema: which version it has, and how it gets to the newest one.

Everything here is synchronous and opens its own connections. Nothing else may have the database
open for writing while it is upgraded.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, create_engine, event
from sqlalchemy.pool import NullPool

from sessions.errors import DatabaseDamaged, SchemaOutdated, SchemaTooNew

MIGRATIONS_DIR = Path(__file__).resolve().parent.parent / "migrations"
BACKUPS_KEPT = 3
BACKUP_MAX_AGE = timedelta(days=30)
BUSY_TIMEOUT_S = 30.0

_BACKUP_GLOB = "backup-*.sqlite3"


def current(db_path: Path) -> str | None:
    """The schema version of a database; None when there is none yet. Raises DatabaseDamaged."""
    if not db_path.exists():
        return None
    try:
        with closing(_connect_read_only(db_path)) as db:
            if not _has_table(db, "alembic_version"):
                return None
            row = db.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise DatabaseDamaged(db_path, str(error)) from error
    return None if row is None else str(row[0])


def head() -> str:
    """The schema version that this program needs."""
    newest = ScriptDirectory.from_config(_config()).get_current_head()
    assert newest is not None, "there is at least one migration"
    return newest


def is_outdated(db_path: Path) -> bool:
    """Whether an upgrade is due, a new database included. Raises DatabaseDamaged, SchemaTooNew."""
    found, newest = current(db_path), head()
    if found == newest:
        return False
    if found is not None and found not in _known_versions():
        raise SchemaTooNew(db_path, found, newest)
    return True


def require_current(db_path: Path) -> None:
    """Raises SchemaOutdated (which names the command), SchemaTooNew, DatabaseDamaged."""
    if is_outdated(db_path):
        raise SchemaOutdated(db_path, current(db_path), head())


def upgrade(
    db_path: Path, backup_dir: Path, progress: Callable[[str], None] = lambda _: None
) -> Path | None:
    """Bring a database to the newest schema, or make it; the whole upgrade is one transaction.

    One that has content is backed up first; returns that backup's path. `progress` gets a line
    for each step. Raises SchemaTooNew, DatabaseDamaged.
    """
    if not is_outdated(db_path):
        progress(f"the database has the current schema {head()}")
        expire_backups(backup_dir)
        return None
    backup_path = None
    if _has_content(db_path):
        backup_path = back_up(db_path, backup_dir)
        progress(f"backup: {backup_path}")
    else:
        db_path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(db_path, os.O_CREAT | os.O_RDWR, 0o600))  # private: it holds all chats
    _run_migrations(db_path)
    progress(f"the database has now schema {head()}")
    expire_backups(backup_dir)
    return backup_path


def back_up(db_path: Path, backup_dir: Path) -> Path:
    """Copy a database, in use or not, by SQLite's backup API; returns the copy's path."""
    backup_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    target = backup_dir / f"backup-{stamp}-{current(db_path) or 'none'}.sqlite3"
    partial = target.with_suffix(".partial")
    os.close(os.open(partial, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600))
    with closing(_connect_read_only(db_path)) as source, closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, whole without a log beside it
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.rename(target)
    return target


def expire_backups(backup_dir: Path, now: datetime | None = None) -> list[Path]:
    """Delete backups beyond the newest three or older than 30 days; returns what was deleted.

    Backups still hold chats that were purged since, so call it at every start as well.
    """
    oldest = ((now or datetime.now(UTC)) - BACKUP_MAX_AGE).timestamp()
    newest_first = sorted(backup_dir.glob(_BACKUP_GLOB), reverse=True)
    expired = [
        path
        for rank, path in enumerate(newest_first)
        if rank >= BACKUPS_KEPT or path.stat().st_mtime < oldest
    ]
    for path in [*expired, *backup_dir.glob("backup-*.partial")]:
        path.unlink(missing_ok=True)
    return expired


def _run_migrations(db_path: Path) -> None:
    db_engine = create_engine(
        URL.create("sqlite", database=str(db_path)),
        poolclass=NullPool,
        # BEGIN is ours: the driver would not open a transaction for a CREATE TABLE.
        connect_args={"isolation_level": None, "timeout": BUSY_TIMEOUT_S},
    )

    @event.listens_for(db_engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        # Foreign keys stay off: batch migrations drop and rename tables that others refer to.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(db_engine, "begin")
    def start_transaction(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    config = _config()
    try:
        with db_engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
            if broken:
                raise DatabaseDamaged(db_path, f"{len(broken)} rows refer to rows that are gone")
    finally:
        db_engine.dispose()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_DIR).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _known_versions() -> set[str]:
    return {step.revision for step in ScriptDirectory.from_config(_config()).walk_revisions()}


def _connect_read_only(db_path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{db_path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S
    )


def _has_table(db: sqlite3.Connection, name: str) -> bool:
    found = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,))
    return found.fetchone() is not None


def _has_content(db_path: Path) -> bool:
    if not db_path.exists():
        return False
    with closing(_connect_read_only(db_path)) as db:
        return db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None

"""The schema: models and migrations agree, an outdated one is refused, backups are taken."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.pool import NullPool

from sessions import migrate
from sessions.database import Database
from sessions.errors import DatabaseDamaged, SchemaOutdated, SchemaTooNew
from sessions.models import Base


def _execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def _is_search_index(table: str) -> bool:
    """Virtual tables and what SQLite keeps for them: the models do not know them."""
    return re.fullmatch(r"(message|title)_(search|terms)(_\w+)?", table) is not None


def _schema(connection: Connection) -> dict[str, object]:
    """Everything that SQLite knows of the tables, but for the order of the columns."""
    found: dict[str, object] = {}
    for table in inspect(connection).get_table_names():
        if table == "alembic_version" or _is_search_index(table):
            continue
        columns = connection.exec_driver_sql(f"PRAGMA table_info('{table}')").all()
        keys = connection.exec_driver_sql(f"PRAGMA foreign_key_list('{table}')").all()
        indexes = connection.exec_driver_sql(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ?", (table,)
        ).all()
        found[table] = (
            {tuple(column[1:]) for column in columns},
            {tuple(key[2:]) for key in keys},
            {tuple(index) for index in indexes},
        )
    return found


def test_models_and_migrations_agree(db_path: Path) -> None:
    db_engine = create_engine(f"sqlite:///{db_path}", poolclass=NullPool)
    with db_engine.connect() as connection:
        options = {
            "compare_type": True,
            "include_name": lambda name, kind, _: kind != "table" or not _is_search_index(name),
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        migrated = _schema(connection)
    from_models = create_engine("sqlite://")
    with from_models.connect() as connection:
        Base.metadata.create_all(connection)
        assert migrated == _schema(connection)
    from_models.dispose()
    assert set(migrated) == set(Base.metadata.tables)


def test_new_database_is_private_and_needs_no_backup(tmp_path: Path) -> None:
    path = tmp_path / "data" / "rejoinder.db"
    assert migrate.is_outdated(path)
    assert not path.exists(), "asking makes no file"
    lines: list[str] = []
    assert migrate.upgrade(path, tmp_path / "backups", lines.append) is None
    assert migrate.current(path) == migrate.head()
    assert not (tmp_path / "backups").exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert any(migrate.head() in line for line in lines)


def test_upgrade_of_a_current_database_changes_nothing(db_path: Path, tmp_path: Path) -> None:
    before = db_path.read_bytes()
    assert migrate.upgrade(db_path, tmp_path / "backups") is None
    assert db_path.read_bytes() == before


@pytest.mark.anyio
@pytest.mark.parametrize("found", ["missing", "empty", "older"])
async def test_outdated_schema_is_refused_with_the_command(
    found: str, db_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found == "missing":
        db_path.unlink()
    elif found == "empty":
        db_path.write_bytes(b"")
    else:
        _execute(db_path, "UPDATE alembic_version SET version_num = '0000'")
        known = migrate._known_versions() | {"0000"}
        monkeypatch.setattr(migrate, "_known_versions", lambda: known)
    with pytest.raises(SchemaOutdated, match="rejoinder db upgrade"):
        await Database.open(db_path)


@pytest.mark.anyio
async def test_schema_of_a_later_version_is_refused(db_path: Path, tmp_path: Path) -> None:
    _execute(db_path, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew, match="9999"):
        await Database.open(db_path)
    with pytest.raises(SchemaTooNew):
        migrate.upgrade(db_path, tmp_path / "backups")


@pytest.mark.anyio
async def test_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rejoinder.db"
    path.write_bytes(b"this is no database, and long enough to be read as a header" * 100)
    with pytest.raises(DatabaseDamaged, match=r"rejoinder\.db"):
        await Database.open(path)


def test_upgrade_backs_up_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "rejoinder.db"
    _execute(path, "PRAGMA journal_mode = WAL", "CREATE TABLE kept (value TEXT)")
    with closing(sqlite3.connect(path)) as open_elsewhere:
        open_elsewhere.execute("INSERT INTO kept VALUES ('still in the log')")
        open_elsewhere.commit()
        backup = migrate.upgrade(path, tmp_path / "backups")
    assert backup is not None
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    with closing(sqlite3.connect(backup)) as db:
        assert db.execute("SELECT value FROM kept").fetchall() == [("still in the log",)]
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert migrate.current(backup) is None
    assert migrate.current(path) == migrate.head()
    assert sorted(item.name for item in (tmp_path / "backups").iterdir()) == [backup.name]


def test_failed_upgrade_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rejoinder.db"
    _execute(path, "CREATE TABLE turn (stale TEXT)")  # in the way of the migration
    with pytest.raises(Exception, match="turn already exists"):
        migrate.upgrade(path, tmp_path / "backups")
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("turn",)]


def test_backups_expire_by_number_and_age(db_path: Path, tmp_path: Path) -> None:
    directory = tmp_path / "backups"
    made = [migrate.back_up(db_path, directory) for _ in range(5)]
    assert migrate.expire_backups(directory) == [made[1], made[0]]
    assert sorted(directory.iterdir()) == made[2:]
    old = (datetime.now(UTC) - timedelta(days=31)).timestamp()
    os.utime(made[2], (old, old))
    (directory / "notes.txt").write_text("not a backup")
    assert migrate.expire_backups(directory) == [made[2]]
    assert migrate.expire_backups(directory, datetime.now(UTC) + timedelta(days=31)) == [
        made[4],
        made[3],
    ]
    assert [item.name for item in directory.iterdir()] == ["notes.txt"]


def test_expiry_without_a_backup_directory_is_quiet(tmp_path: Path) -> None:
    assert migrate.expire_backups(tmp_path / "none") == []

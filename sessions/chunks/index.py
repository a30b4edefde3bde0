"""The store's index: which owner has which file, and which stripes lie where in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sessions.chunks.catalog import OwnerEntry, Stripe
from sessions.chunks.layout import VERSION as FORMAT_VERSION
from sessions.chunks.layout import Layout, parse_layout
from sessions.chunks.rows import OwnerRow, is_shared, owner_row, stripe_sound

SCHEMA_VERSION = 100 * FORMAT_VERSION + 1  # files of another format are of no use
_SCHEMA = (
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE owner(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,"
    " shared INTEGER NOT NULL, used INTEGER NOT NULL, file TEXT NOT NULL UNIQUE,"
    " size INTEGER NOT NULL, live INTEGER NOT NULL)",
    "CREATE INDEX owner_lru ON owner(shared, used)",
    "CREATE INDEX owner_wasteful ON owner(id) WHERE size > 2 * live",
    "CREATE TABLE fingerprint(id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE)",
    "CREATE TABLE layout(id INTEGER PRIMARY KEY, spec BLOB NOT NULL UNIQUE)",
    "CREATE TABLE stripe(id INTEGER PRIMARY KEY AUTOINCREMENT,"
    " owner INTEGER NOT NULL REFERENCES owner(id) ON DELETE CASCADE,"
    " fingerprint INTEGER NOT NULL REFERENCES fingerprint(id),"
    " start INTEGER NOT NULL, parent BLOB NOT NULL, ids BLOB NOT NULL,"
    " layout INTEGER NOT NULL REFERENCES layout(id),"
    " offset INTEGER NOT NULL, total INTEGER NOT NULL)",
    "CREATE INDEX stripe_owner ON stripe(owner)",
)
_LOAD_STRIPES = (
    "SELECT s.id, s.offset, s.total, f.digest, s.start, s.parent, s.ids, s.layout"
    " FROM stripe s JOIN fingerprint f ON f.id = s.fingerprint WHERE s.owner = ?"
)


class Index:
    """One connection to the index file. Used by one thread at a time; sqlite3.Error passes through.

    The store has two: the writer thread's, and one that only reads, under the catalog's lock.
    """

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.text_factory = lambda raw: raw.decode(errors="replace")
        self._layouts: dict[int, Layout] = {}
        self._layout_ids: dict[bytes, int] = {}
        self._fingerprint_ids: dict[bytes, int] = {}
        self.rows_read = 0  # owners and stripes, since this connection was opened
        try:
            self._db.execute("PRAGMA busy_timeout = 5000")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            # token ids are text: a deleted chat must leave none in free pages
            self._db.execute("PRAGMA secure_delete = ON")
        except sqlite3.Error:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    @property
    def schema_version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def sound(self) -> bool:
        """SQLite finds no damage. Reads the whole index."""
        try:
            return bool(self._db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except sqlite3.DatabaseError:
            return False

    def create_schema(self) -> None:
        """Lay the tables, inside the caller's transaction."""
        for statement in _SCHEMA:
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Durable when the block ends; undone when it raises."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                # numbers given to new layouts and fingerprints are undone too
                self._layout_ids.clear()
                self._fingerprint_ids.clear()
                self._layouts.clear()
                self._db.execute("ROLLBACK")

    def truncate_log(self) -> None:
        """Move all into the main file, so that the log holds nothing of deleted owners."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def get_meta(self, key: str, default: int = 0) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            return default
        if not isinstance(row[0], int):
            raise sqlite3.DatabaseError(f"{key} is damaged")
        return row[0]

    def set_meta(self, **values: int) -> None:
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    # -- reading

    def load(self, owner: str) -> OwnerEntry | None:
        """The owner's file and stripes; None when nothing is held."""
        row = self.find_owner(owner)
        if row is None:
            return None
        entry = OwnerEntry(row.id, owner, row.file, row.size)
        rows = self._db.execute(_LOAD_STRIPES, (entry.id,)).fetchall()
        self.rows_read += 1 + len(rows)
        for stripe_id, offset, total, digest, start, parent, ids, layout in rows:
            known = self._layouts.get(layout) or self._layout(layout)
            one = Stripe(stripe_id, entry.file, offset, total, digest, start, parent, ids, known)
            if not stripe_sound(one, owner):
                raise sqlite3.DatabaseError(f"the row of stripe {stripe_id} is damaged")
            entry.add(one)
        return entry

    def _layout(self, layout_id: int) -> Layout:
        row = self._db.execute("SELECT spec FROM layout WHERE id = ?", (layout_id,)).fetchone()
        try:
            layout = parse_layout(row[0])
        except (TypeError, ValueError) as error:
            raise sqlite3.DatabaseError(f"layout {layout_id} is damaged") from error
        self._layouts[layout_id] = layout
        return layout

    def find_owner(self, owner: str) -> OwnerRow | None:
        """The owner's row; None when nothing is held."""
        row = self._db.execute(
            "SELECT id, name, file, size, live, used FROM owner WHERE name = ?", (owner,)
        ).fetchone()
        return None if row is None else owner_row(row)

    def owners(self) -> list[OwnerRow]:
        """Every owner. Grows with their number: never on the way to the first request."""
        rows = self._db.execute("SELECT id, name, file, size, live, used FROM owner").fetchall()
        self.rows_read += len(rows)
        return [owner_row(row) for row in rows]

    def least_recent(self) -> Iterator[OwnerRow]:
        """Owners to evict, in order: least recently used first, shared prefixes last."""
        cursor = self._db.execute(
            "SELECT id, name, file, size, live, used FROM owner ORDER BY shared, used"
        )
        for row in cursor:
            self.rows_read += 1
            yield owner_row(row)

    def wasteful(self) -> list[str]:
        """Owners whose files are more than half superseded stripes."""
        return [row[0] for row in self._db.execute("SELECT name FROM owner WHERE size > 2 * live")]

    def num_stripes(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM stripe").fetchone()[0])

    # -- writing, inside a transaction

    def add_owner(self, name: str, file: str, used: int) -> int:
        """The number of a new owner, with a file and no stripes yet."""
        cursor = self._db.execute(
            "INSERT INTO owner(name, shared, used, file, size, live) VALUES (?, ?, ?, ?, 0, 0)",
            (name, int(is_shared(name)), used, file),
        )
        return int(cursor.lastrowid or 0)

    def set_file(self, owner_id: int, file: str, size: int, live: int) -> None:
        self._db.execute(
            "UPDATE owner SET file = ?, size = ?, live = ? WHERE id = ?",
            (file, size, live, owner_id),
        )

    def delete_owners(self, owner_ids: Iterable[int]) -> None:
        self._db.executemany("DELETE FROM owner WHERE id = ?", ((one,) for one in owner_ids))

    def touch(self, used: Mapping[str, int]) -> None:
        self._db.executemany(
            "UPDATE owner SET used = ? WHERE name = ?",
            ((tick, name) for name, tick in used.items()),
        )

    def add_stripe(self, owner_id: int, stripe: Stripe) -> int:
        """Number of the new stripe; never given twice."""
        cursor = self._db.execute(
            "INSERT INTO stripe(owner, fingerprint, start, parent, ids, layout, offset, total)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                owner_id,
                self._intern("fingerprint", "digest", stripe.fingerprint, self._fingerprint_ids),
                stripe.start,
                stripe.parent,
                stripe.ids,
                self._intern("layout", "spec", stripe.layout.spec, self._layout_ids),
                stripe.offset,
                stripe.total,
            ),
        )
        return int(cursor.lastrowid or 0)

    def recount(self, owner_id: int) -> None:
        """Sum up an owner's live bytes again."""
        self._db.execute(
            "UPDATE owner SET live ="
            " (SELECT coalesce(sum(total), 0) FROM stripe WHERE stripe.owner = owner.id)"
            " WHERE id = ?",
            (owner_id,),
        )

    def delete_stripes(self, stripe_ids: Iterable[int]) -> None:
        self._db.executemany("DELETE FROM stripe WHERE id = ?", ((one,) for one in stripe_ids))

    def move_stripes(self, offsets: Mapping[int, int]) -> None:
        self._db.executemany(
            "UPDATE stripe SET offset = ? WHERE id = ?",
            ((offset, stripe_id) for stripe_id, offset in offsets.items()),
        )

    def stale(self, fingerprint: bytes) -> bool:
        """Whether stripes of another fingerprint may be held; does not grow with their number."""
        row = self._db.execute(
            "SELECT 1 FROM fingerprint WHERE digest != ? LIMIT 1", (fingerprint,)
        ).fetchone()
        return row is not None

    def delete_stale(self, fingerprint: bytes) -> list[OwnerRow]:
        """Delete stripes of other fingerprints; the owners left with none are deleted, returned."""
        others = "(SELECT id FROM fingerprint WHERE digest != ?)"
        self._db.execute(f"DELETE FROM stripe WHERE fingerprint IN {others}", (fingerprint,))
        self._db.execute("DELETE FROM fingerprint WHERE digest != ?", (fingerprint,))
        self._fingerprint_ids.clear()
        self._db.execute(
            "UPDATE owner SET live ="
            " (SELECT coalesce(sum(total), 0) FROM stripe WHERE stripe.owner = owner.id)"
        )
        rows = self._db.execute("SELECT id, name, file, size, live, used FROM owner WHERE live = 0")
        empty = [owner_row(row) for row in rows.fetchall()]
        self.delete_owners(row.id for row in empty)
        return empty

    def _intern(self, table: str, column: str, value: bytes, known: dict[bytes, int]) -> int:
        number = known.get(value)
        if number is None:
            self._db.execute(f"INSERT OR IGNORE INTO {table}({column}) VALUES (?)", (value,))
            row = self._db.execute(
                f"SELECT id FROM {table} WHERE {column} = ?", (value,)
            ).fetchone()
            number = known[value] = int(row[0])
        return number

"""What the store's threads share, and deletion: of chosen owners and of those used longest ago."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from sessions.chunks.audit import audit
from sessions.chunks.catalog import Catalog, OwnerEntry, Stripe
from sessions.chunks.disk_space import NoSpace, measure, same_device
from sessions.chunks.files import Bounce, ChunkFiles
from sessions.chunks.index import Index
from sessions.chunks.rebuild import rebuild
from sessions.chunks.reconcile import open_index
from sessions.chunks.report import CheckReport
from sessions.chunks.rows import OwnerRow

log = logging.getLogger(__name__)

WARN_EVERY_S = 60.0

Hook = Callable[[str], None]


@dataclass(slots=True)
class Counters:
    """Since the store was opened. Changed by the writer thread, `stripes_rejected` by any."""

    stripes_written: int = 0
    stripes_dropped: int = 0
    stripes_rejected: int = 0
    evictions: int = 0  # owners that lost their stripes to the cap or to a full disk
    compactions: int = 0
    refusals: int = 0  # writes that the system did not take


@dataclass(slots=True, eq=False)
class StoreState:
    """Owns index, files and accounting. Unless said otherwise: the writer thread only.

    `used` is the sum of the chunk files in bytes, `reserved` what writes in hand may add to it;
    together they never exceed `cap`. `hook` is called with the name of each step about to be made
    and may raise what the step might.
    """

    files: ChunkFiles
    index: Index
    reader_index: Index
    catalog: Catalog
    cap: int
    hook: Hook
    audit_due: bool
    start_report: CheckReport
    used: int = 0
    reserved: int = 0
    counters: Counters = field(default_factory=Counters)
    wasteful: set[str] = field(default_factory=set)  # owners worth compacting
    recount_due: bool = False
    agreed: bool = True  # False when index and files could not be compared
    warn_at: float = 0.0  # monotonic seconds, when a refused write is worth a line again
    bounce: Bounce = field(default_factory=Bounce)
    trouble: str = ""  # why the last write was refused; empty when the last one was not

    @classmethod
    def open(cls, files: ChunkFiles, cap: int, hook: Hook) -> StoreState:
        """Agree index and files. Raises OSError and sqlite3.Error."""
        report = CheckReport()
        index, clean = open_index(files, report)
        reader = Index(files.index_path)
        catalog = Catalog(reader.load, index.get_meta("tick"))
        state = cls(files, index, reader, catalog, cap, hook, clean, report)
        state.used = index.get_meta("bytes") if clean else sum(files.listing().values())
        report.bytes = state.used
        for problem in report.problems:
            log.warning("chunk store: %s", problem)
        return state

    @property
    def rows_read(self) -> int:
        """Rows of owners and stripes read by both connections."""
        return self.index.rows_read + self.reader_index.rows_read

    def settle(self) -> None:
        """What opening left for later: obey a cap that became smaller."""
        self.hook("settle")
        self.wasteful.update(self.index.wasteful())
        if self.used > self.cap:
            self.make_room(0, ())

    def compare(self) -> None:
        """Compare with the files, once after a clean end; takes the longer the more there are."""
        if not self.audit_due:
            return
        self.audit_due = self.agreed = False
        report = CheckReport()
        self.used = audit(self.index, self.files, report, verify=False, repair=True)
        self.agreed = True
        if report.problems:
            with self.catalog.lock:
                self.catalog.clear()
            for problem in report.problems:
                log.warning("chunk store: %s", problem)
            self.wasteful.update(self.index.wasteful())
        if self.used > self.cap:
            self.make_room(0, ())

    def room_on_disk(self, file: str, need: int) -> bool:
        """Whether `need` more bytes fit beside a file, with nothing deleted. Raises OSError."""
        return measure(self.files.path(file).parent).missing(need) <= 0

    def close_index(self) -> None:
        """Note that index and files agree, as far as is known, and close."""
        if self.agreed:
            with self.index.transaction():
                self.flush_touched()
                self.index.set_meta(clean=1, bytes=self.used)
        self.abandon()

    def rebuild_index(self) -> None:
        """Make the index anew from the files, after SQLite found it damaged or somebody lost it."""
        log.warning("chunk store: the index is damaged and is made anew from the files")
        with self.catalog.lock:
            self.catalog.damaged = True  # `find` does without, meanwhile
            self.reader_index.close()
        self.index.close()
        self.index = rebuild(self.files, CheckReport())
        self.reader_index = Index(self.files.index_path)
        with self.catalog.lock:
            self.catalog.reload_with(self.reader_index.load)
        self.recount()
        self.audit_due = False

    def recount(self) -> None:
        """Count the files again, after a failure that left one longer than it should be.

        Where whole directories are gone the store begins anew with what is left.
        """
        if self.files.lost:
            log.warning("chunk store: somebody removed a directory of it; it is made anew")
            self.files.make_anew()
            self.recount_due = False  # now: making the index anew counts too
            self.rebuild_index()
        self.used = sum(self.files.listing().values())
        self.recount_due = False

    def refused(self, error: OSError | sqlite3.Error) -> None:
        """The system refused a write, which costs stripes: one line in the log a minute."""
        self.counters.refusals += 1
        self.trouble = (isinstance(error, OSError) and error.strerror) or str(error)
        now = time.monotonic()
        if now >= self.warn_at:
            self.warn_at = now + WARN_EVERY_S
            log.warning(
                "chunk store: a write was refused (%s): its stripes are dropped, "
                "%d so far; the next ones are tried again",
                error,
                self.counters.stripes_dropped,
            )
        if isinstance(error, FileNotFoundError):
            self.recount_due = True

    def accepted(self) -> None:
        """The system took a write."""
        if self.trouble:
            self.trouble = ""
            self.warn_at = 0.0
            log.warning(
                "chunk store: writes are taken again; %d stripes were dropped since the start",
                self.counters.stripes_dropped,
            )

    def abandon(self) -> None:
        """Close both connections without a word on whether index and files agree: nothing is
        saved from here on, which is told where troubles are."""
        self.trouble = "the writer of checkpoints failed; restart the server"
        with self.catalog.lock:
            self.reader_index.close()
        self.index.close()

    def flush_touched(self) -> None:
        """Write noted uses, inside a transaction."""
        with self.catalog.lock:
            touched, self.catalog.touched = self.catalog.touched, {}
        if touched:
            self.index.touch(touched)
        self.index.set_meta(tick=self.catalog.tick)

    def make_room(
        self, need: int, protected: Collection[str], used_before: int | None = None
    ) -> bool:
        """Delete owners until `need` more bytes fit; False, with nothing lost, if they cannot.

        With `used_before` only owners last used before that tick.
        """
        missing = self.used + self.reserved + need - self.cap
        if missing <= 0:
            return True
        self._evict(
            missing,
            protected,
            lambda row: used_before is None or row.used < used_before,
            in_part=not need,
        )
        return self.used + self.reserved + need <= self.cap

    def make_room_on_disk(self, file: str, need: int, protected: Collection[str]) -> None:
        """Delete owners on a file's disk until `need` more bytes fit and some stay free.

        Whoever else fills the disk comes first, above all the database: checkpoints give way, even
        where that is not enough for more of them. Raises NoSpace when it is not, and OSError.
        """
        directory = self.files.path(file).parent

        def beside(row: OwnerRow) -> bool:
            try:
                return same_device(self.files.path(row.file).parent, directory)
            except OSError:
                return False

        while (missing := measure(directory).missing(need)) > 0:
            if not self._evict(missing, protected, beside, in_part=True):
                raise NoSpace(directory)

    def _evict(
        self,
        missing: int,
        protected: Collection[str],
        may_go: Callable[[OwnerRow], bool],
        *,
        in_part: bool,
    ) -> int:
        """Delete the owners used longest ago, about `missing` bytes of them; how many.

        None when they do not come to that, unless `in_part`.
        """
        with self.catalog.lock:
            kept = {*protected, *(owner for owner, n in self.catalog.reading.items() if n)}
        victims: list[OwnerRow] = []
        with self.index.transaction():
            self.flush_touched()
            for row in self.index.least_recent():
                if missing <= 0:
                    break
                if row.name not in kept and may_go(row):
                    victims.append(row)
                    missing -= row.size
            if not victims or (missing > 0 and not in_part):
                return 0
            self.hook("delete.commit")
            self.index.delete_owners(row.id for row in victims)
        self.counters.evictions += len(victims)
        self._unlink_all(victims)
        return len(victims)

    def delete(self, rows: Collection[OwnerRow]) -> None:
        """Owners with all they have: index commit, then unlink."""
        if rows:
            self.hook("delete.commit")
            with self.index.transaction():
                self.index.delete_owners(row.id for row in rows)
            self._unlink_all(rows)

    def _unlink_all(self, rows: Collection[OwnerRow]) -> None:
        """Remove the files of owners that the index no longer has."""
        with self.catalog.lock:
            for row in rows:
                self.catalog.drop(row.name)
                self.wasteful.discard(row.name)
        for row in rows:
            self.hook("delete.unlink")
            self.unlink(row.file, row.size)

    def unlink(self, file: str, size: int) -> None:
        """Remove a file that the index no longer knows; what cannot be removed stays counted."""
        if self.files.remove(file):
            self.used -= size
        else:
            log.warning("chunk store: %s cannot be removed", file)

    def forget(self, owners: Collection[str], only_file: str = "") -> None:
        """Delete these owners, or only while their file is `only_file`; leave no trace of ids."""
        rows = []
        for owner in owners:
            row = self.index.find_owner(owner)
            if row is not None and only_file in ("", row.file):
                rows.append(row)
        self.delete(rows)
        if rows and not only_file:
            self.index.truncate_log()

    def collect(self, fingerprint: bytes) -> None:
        """Delete stripes of every other fingerprint."""
        if not self.index.stale(fingerprint):
            return
        self.hook("collect.commit")
        with self.index.transaction():
            empty = self.index.delete_stale(fingerprint)
        with self.catalog.lock:
            self.catalog.clear()
        for row in empty:
            self.hook("collect.unlink")
            self.unlink(row.file, row.size)
        self.wasteful.update(self.index.wasteful())

    def remove_stripes(self, owner: str, stripe_ids: Collection[int]) -> None:
        """Take bad stripes out of the index; their bytes stay until the file is compacted."""
        row = self.index.find_owner(owner)
        if row is not None:
            self.hook("reject.commit")
            with self.index.transaction():
                self.index.delete_stripes(stripe_ids)
                self.index.recount(row.id)
            row = self.index.find_owner(owner)
            if row is not None and not row.live:
                self.delete([row])
            elif row is not None and row.size > 2 * row.live:
                self.wasteful.add(owner)
        with self.catalog.lock:
            self.catalog.rejected.difference_update(stripe_ids)

    def reject(self, owner: str, stripe: Stripe) -> None:
        """Never hand this stripe out again. Any thread; the writer must still remove it."""
        with self.catalog.lock:
            entry: OwnerEntry | None = self.catalog.loaded(owner)
            if entry is not None:
                entry.discard(stripe.id)
            self.catalog.rejected.add(stripe.id)
            self.counters.stripes_rejected += 1

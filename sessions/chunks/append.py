"""Writing stripes: append to the owners' files, one fsync a file, one index commit for all."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sessions.chunks.catalog import OwnerEntry, Stripe, covers, superseded_by
from sessions.chunks.files import write_past_cache
from sessions.chunks.layout import (
    ALIGN,
    Layout,
    align_up,
    encode_header,
    header_bytes,
    payload_crcs,
)
from sessions.chunks.state import Counters, StoreState

_MAX_BUFFERS = 512  # in one system call
_ZEROS = bytes(ALIGN)


@dataclass(slots=True, eq=False)
class Append:
    """A stripe to write; `done` is called once, from the writer thread."""

    owner: str
    fingerprint: bytes
    start: int
    parent: bytes
    ids: bytes
    layout: Layout
    payload: Sequence[memoryview]
    done: Callable[[bool], None]
    durable: bool = False
    written: bool = False

    @property
    def total(self) -> int:
        """Bytes that it takes in a file."""
        size = header_bytes(self.owner.encode(), self.fingerprint, self.ids, self.layout)
        return align_up(size + self.layout.payload_bytes)

    def stripe(self) -> Stripe:
        """The stripe, without its place and number."""
        return Stripe(
            0, "", 0, self.total, self.fingerprint, self.start, self.parent, self.ids, self.layout
        )

    def finish(self, counters: Counters) -> None:
        """Count it and tell its owner."""
        if self.written:
            counters.stripes_written += 1
        elif not self.durable:
            counters.stripes_dropped += 1
        self.payload = ()
        self.done(self.durable)


@dataclass(slots=True, eq=False)
class _FileJob:
    """What one owner gets in this group."""

    owner: str
    entry: OwnerEntry | None
    appends: list[tuple[Append, Stripe]]
    file: str = ""
    fd: int = -1
    direct: bool = False  # writes bypass the page cache
    before: int = 0  # bytes of the file when the group began
    size: int = 0


def write_group(state: StoreState, group: Sequence[Append]) -> None:
    """Make stripes durable, as many as fit; sets `durable` of each.

    A failure of one file costs the stripes of its owner only. Raises sqlite3.Error when the index
    cannot take them: the files are then as before.
    """
    owners = {append.owner for append in group}
    with state.catalog.lock:
        state.catalog.busy = owners
        entries = {owner: state.catalog.entry(owner) for owner in owners}
    jobs = {owner: _FileJob(owner, entry, []) for owner, entry in entries.items()}
    refusals = state.counters.refusals
    try:
        _admit(state, group, jobs, owners)
        written = [job for job in jobs.values() if job.appends and _write_file(state, job, owners)]
        # all are written before the first is synced: that one's journal commit serves the others
        synced = [job for job in written if _sync_file(state, job)]
        synced = _sync_new_names(state, synced)
        if synced:
            _commit(state, synced)
            if state.counters.refusals == refusals:
                state.accepted()
    except (sqlite3.Error, OSError):
        for job in jobs.values():
            _undo(state, job)
        raise
    finally:
        with state.catalog.lock:
            state.catalog.busy = set()
        if state.recount_due:
            state.recount()


def _admit(
    state: StoreState, group: Sequence[Append], jobs: dict[str, _FileJob], owners: set[str]
) -> None:
    """Reserve space for each stripe that is new and fits."""
    for append in group:
        job = jobs[append.owner]
        stripe = append.stripe()
        if job.entry is not None:
            with state.catalog.lock:
                known = list(job.entry.stripes.get((append.start, append.parent), ()))
            if any(covers(old, stripe) for old in known):
                append.durable = True
                continue
        state.hook("reserve")
        if state.make_room(stripe.total, owners):
            state.reserved += stripe.total
            job.appends.append((append, stripe))


def _write_file(state: StoreState, job: _FileJob, owners: set[str]) -> bool:
    """Append a job's stripes to its file; False when nothing could be written."""
    try:
        _open(state, job)
        state.make_room_on_disk(job.file, sum(s.total for _, s in job.appends), owners)
    except OSError as error:
        state.refused(error)
        _undo(state, job)
        return False
    try:
        for append, stripe in list(job.appends):
            try:
                state.hook("write")
                _write_stripe(state, job, append, stripe)
            except OSError as error:
                state.refused(error)
                os.ftruncate(job.fd, job.size)
                job.appends.remove((append, stripe))
                state.reserved -= stripe.total
            else:
                stripe.file, stripe.offset = job.file, job.size
                job.size += stripe.total
        if not job.appends:
            _undo(state, job)
            return False
        _start_writeback(job)
    except OSError as error:
        state.refused(error)
        _undo(state, job)
        return False
    return True


def _start_writeback(job: _FileJob) -> None:
    """Have the disk begin, and the page cache drop what is on disk already."""
    if job.direct:
        return
    with contextlib.suppress(OSError):
        os.posix_fadvise(job.fd, job.before, job.size - job.before, os.POSIX_FADV_DONTNEED)


def _sync_file(state: StoreState, job: _FileJob) -> bool:
    """Make a job's file durable; False when that failed and it is undone."""
    try:
        state.hook("fsync")
        os.fsync(job.fd)
    except OSError as error:
        state.refused(error)
        _undo(state, job)
        return False
    _start_writeback(job)  # all is on disk now: only drops it from the page cache
    return True


def _sync_new_names(state: StoreState, jobs: list[_FileJob]) -> list[_FileJob]:
    """Make new files' names durable; the jobs left, with those undone for which it failed."""
    new = [job for job in jobs if job.entry is None]
    if not new:
        return jobs
    try:
        state.hook("fsync.dir")
        state.files.sync_dirs(job.file for job in new)
    except OSError as error:
        state.refused(error)
        for job in new:
            _undo(state, job)
        return [job for job in jobs if job.entry is not None]
    return jobs


def _open(state: StoreState, job: _FileJob) -> None:
    """Open the owner's file at the end the index knows, or a new one. Raises OSError."""
    if job.entry is not None:
        try:
            job.fd = state.files.open_write(job.entry.file)
            actual = os.fstat(job.fd).st_size
            job.direct = write_past_cache(job.fd)
            if actual >= job.entry.size:
                job.file, job.before, job.size = job.entry.file, job.entry.size, job.entry.size
                if actual > job.size:  # left by a write that failed and could not be undone
                    os.ftruncate(job.fd, job.size)
                    state.recount()
                return
            os.close(job.fd)
            job.fd = -1
        except FileNotFoundError:
            pass
        # gone or cut short behind our back: nothing of it can be trusted to be there
        row = state.index.find_owner(job.owner)
        if row is not None:
            state.delete([row])
        job.entry = None
    state.hook("create")
    job.file, job.fd = state.files.create()
    job.direct = write_past_cache(job.fd)


def _write_stripe(state: StoreState, job: _FileJob, append: Append, stripe: Stripe) -> None:
    """Write header, chunks and padding at the end of the file. Raises OSError."""
    header = encode_header(stripe.head(append.owner), payload_crcs(append.payload))
    padding = stripe.total - len(header) - stripe.layout.payload_bytes
    buffers = [memoryview(header), *append.payload, memoryview(_ZEROS)[:padding]]
    if job.direct:
        buffers = [state.bounce.gather(buffers, stripe.total)]
    at = job.size
    while buffers:
        try:
            written = os.pwritev(job.fd, buffers[:_MAX_BUFFERS], at)
        except OSError as error:
            if error.errno != errno.EINVAL or not job.direct:
                raise
            # the file system took the flag and does not do it, or went on from an odd place
            job.direct = write_past_cache(job.fd, False)
            continue
        at += written
        while buffers and written >= len(buffers[0]):
            written -= len(buffers[0])
            buffers.pop(0)
        if written:
            buffers[0] = buffers[0][written:]


def _commit(state: StoreState, jobs: Sequence[_FileJob]) -> None:
    """Enter what was written into the index, then into memory. Raises sqlite3.Error."""
    live: dict[str, tuple[OwnerEntry, list[Stripe]]] = {}
    state.hook("commit")
    with state.index.transaction():
        for job in jobs:
            live[job.owner] = _enter(state, job)
        state.flush_touched()
    with state.catalog.lock:
        for job in jobs:
            entry, stripes = live[job.owner]
            entry.file, entry.size, entry.stripes = job.file, job.size, {}
            for stripe in stripes:
                if stripe.id not in state.catalog.rejected:
                    entry.add(stripe)
            state.catalog.put(entry)
            if job.size > 2 * entry.live:
                state.wasteful.add(job.owner)
    for job in jobs:
        grown = job.size - job.before
        state.used += grown
        state.reserved -= grown
        os.close(job.fd)
        job.fd = -1
        for append, _ in job.appends:
            append.durable = append.written = True
        job.appends = []
    state.hook("committed")


def _enter(state: StoreState, job: _FileJob) -> tuple[OwnerEntry, list[Stripe]]:
    """Write an owner's new stripes into the index; its entry and the stripes it will have."""
    index = state.index
    entry = job.entry
    if entry is None:
        entry = OwnerEntry(index.add_owner(job.owner, job.file, 0), job.owner, job.file, 0)
    with state.catalog.lock:
        stripes = entry.all()
        state.catalog.touch(job.owner)
    for _, new in job.appends:
        group = [s for s in stripes if (s.start, s.parent) == (new.start, new.parent)]
        gone = superseded_by(new, group)
        index.delete_stripes(stripe.id for stripe in gone)
        new.id = index.add_stripe(entry.id, new)
        stripes = [stripe for stripe in stripes if stripe not in gone]
        stripes.append(new)
    index.set_file(entry.id, job.file, job.size, sum(stripe.total for stripe in stripes))
    return entry, stripes


def _undo(state: StoreState, job: _FileJob) -> None:
    """Cut the file back to what the index knows, or remove it; give the reservation back."""
    _release(state, job)
    if job.fd < 0:
        return
    try:
        if job.entry is not None:
            os.ftruncate(job.fd, job.before)
        elif not state.files.remove(job.file):
            state.recount()
    except OSError:
        state.recount()
    finally:
        os.close(job.fd)
        job.fd = -1


def _release(state: StoreState, job: _FileJob) -> None:
    state.reserved -= sum(stripe.total for _, stripe in job.appends)
    job.appends = []

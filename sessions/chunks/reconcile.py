"""Bringing index and files into agreement: at start, after an unclean end, and when asked."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sessions.chunks.catalog import OwnerEntry, Stripe, live_stripes
from sessions.chunks.files import ChunkFiles
from sessions.chunks.index import SCHEMA_VERSION, Index, OwnerRow
from sessions.chunks.scan import Found, scan_file


@dataclass(slots=True)
class CheckReport:
    """What index and files hold, what does not agree, and what of it was put right."""

    owners: int = 0
    stripes: int = 0
    bytes: int = 0  # of all chunk files
    problems: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    owner_names: list[str] = field(default_factory=list)
    files_examined: int = 0
    stripes_scanned: int = 0

    @property
    def clean(self) -> bool:
        """Index and files agree (now)."""
        return len(self.problems) == len(self.fixed)


def check(dirs: Sequence[Path], *, repair: bool = False) -> CheckReport:
    """Compare the index with every byte of the files, of a store that no process has open.

    With `repair` what does not agree is put right: in doubt a stripe is lost, never wrong. Raises
    StoreLockedError and OSError.
    """
    files = ChunkFiles(dirs)
    try:
        report = CheckReport()
        index = open_sound(files, report)
        if index is None and not repair:
            sizes = files.listing()
            report.bytes = sum(sizes.values())
            report.files_examined = len(sizes)
            return report
        index = index or rebuild(files, report)
        try:
            if not index.get_meta("clean"):
                report.problems.append("the store was not closed")
                if repair:
                    report.fixed.append("the store counts as closed")
            total = audit(index, files, report, verify=True, repair=repair)
            if index.get_meta("clean") and index.get_meta("bytes") != total:
                report.problems.append(
                    f"{index.get_meta('bytes')} bytes counted, {total} bytes in files"
                )
                if repair:
                    report.fixed.append("bytes counted again")
            if repair:
                with index.transaction():
                    index.set_meta(clean=1, bytes=total)
                index.truncate_log()
        finally:
            index.close()
        return report
    finally:
        files.unlock()


def open_index(files: ChunkFiles, report: CheckReport) -> tuple[Index, bool]:
    """The index, in agreement with the files, and whether the last end was a clean one.

    After a clean end nothing is compared here, so that the time does not grow with the owners; the
    caller still owes an `audit`. Raises OSError and sqlite3.Error.
    """
    index = open_sound(files, report)
    clean = False
    if index is None:
        index = rebuild(files, report)
    elif index.get_meta("clean"):
        clean = True
    else:
        audit(index, files, report, verify=False, repair=True)
    with index.transaction():
        index.set_meta(clean=0)
    return index, clean


def open_sound(files: ChunkFiles, report: CheckReport) -> Index | None:
    """The index if it is there, of this version and undamaged as far as a look tells."""
    if files.stray_index:
        report.problems.append("an index of other directories")
        return None
    if not files.index_path.exists():
        if files.listing():
            report.problems.append("the index is missing")
        return None
    index = None
    try:
        index = Index(files.index_path)
        version = index.schema_version
        if version == SCHEMA_VERSION and (index.get_meta("clean") or index.sound()):
            return index
        problem = "the index is damaged"
        if version != SCHEMA_VERSION:
            problem = f"the index has version {version}, not {SCHEMA_VERSION}"
    except sqlite3.DatabaseError as error:
        problem = f"the index is damaged: {error}"
    if index is not None:
        index.close()
    report.problems.append(problem)
    return None


def rebuild(files: ChunkFiles, report: CheckReport) -> Index:
    """A new index made from the files, in one transaction; files with nothing sound are removed.

    Raises OSError and sqlite3.Error.
    """
    problems = len(report.problems) - len(report.fixed)
    files.remove_index()
    by_owner: dict[str, list[tuple[int, float, str, int, list[Stripe]]]] = defaultdict(list)
    for name in files.listing():
        fd = files.open_write(name)
        try:
            found = scan_file(fd)
            owner = found[0].header.owner if found else ""
            stripes = live_stripes(
                one.stripe(name) for one in found if one.sound and one.header.owner == owner
            )
            os.ftruncate(fd, max((s.offset + s.total for s in stripes), default=0))
            os.fsync(fd)
            stat = os.fstat(fd)
        finally:
            os.close(fd)
        report.files_examined += 1
        report.stripes_scanned += len(found)
        if stripes:
            by_owner[owner].append((len(stripes), stat.st_mtime, name, stat.st_size, stripes))
        else:
            files.remove(name)
    kept = []
    for owner, copies in by_owner.items():
        # a killed compaction leaves two; the copy never has more than the file it was made from
        copies.sort(key=lambda copy: (copy[0], -copy[3]))
        for _, _, name, _, _ in copies[:-1]:
            files.remove(name)
        _, modified, name, size, stripes = copies[-1]
        kept.append((modified, owner, name, size, stripes))
    kept.sort(key=lambda one: one[0])
    index = Index(files.index_path)
    with index.transaction():
        index.create_schema()
        for tick, (_, owner, name, size, stripes) in enumerate(kept):
            owner_id = index.add_owner(owner, name, tick)
            for stripe in stripes:
                index.add_stripe(owner_id, stripe)
            index.set_file(owner_id, name, size, sum(stripe.total for stripe in stripes))
        index.set_meta(clean=0, tick=len(kept), bytes=sum(one[3] for one in kept))
    report.fixed.extend(f"index rebuilt from {len(kept)} files" for _ in range(problems))
    return index


def audit(
    index: Index, files: ChunkFiles, report: CheckReport, *, verify: bool, repair: bool
) -> int:
    """Compare every owner's row with its file, with `verify` every stripe; the files' bytes."""
    sizes = files.listing()
    total = sum(sizes.values())
    report.files_examined += len(sizes)
    for row in index.owners():
        size = sizes.pop(row.file, None)
        entry = index.load(row.name)
        if size is None or entry is None:
            report.problems.append(f"{row.name}: its file {row.file} is missing")
            if repair:
                _delete(index, files, row)
                report.fixed.append(f"{row.name} forgotten")
        elif size != row.size or verify:
            fd = files.open_write(row.file)
            try:
                found = scan_file(fd, 0 if verify or size < row.size else row.size)
                report.stripes_scanned += len(found)
                state = _examine(row, entry, size, found, verify)
                if state.problem:
                    report.problems.append(f"{row.name}: {state.problem}")
                    if repair:
                        total += _apply(index, files, row, entry, state, fd) - size
                        report.fixed.append(f"{row.name}: {len(state.live)} stripes kept")
            finally:
                os.close(fd)
    for name, size in sizes.items():
        report.problems.append(f"{name} belongs to no owner")
        if repair and files.remove(name):
            report.fixed.append(f"{name} removed")
            total -= size
    owners = index.owners()
    report.owners = len(owners)
    report.owner_names = sorted(row.name for row in owners)
    report.stripes = index.num_stripes()
    report.bytes = total
    return total


@dataclass(frozen=True, slots=True)
class _State:
    """What an owner's file holds; `problem` is empty when the index says the same."""

    live: list[Stripe]
    size: int  # bytes to keep of the file
    problem: str


def _examine(
    row: OwnerRow, entry: OwnerEntry, size: int, found: list[Found], verify: bool
) -> _State:
    """Compare an owner's row with the stripes found in its file of `size` bytes."""
    indexed = entry.all()
    kept = indexed
    if verify or size < row.size:
        places = {one.offset: one for one in found if one.sound and one.header.owner == row.name}
        kept = [s for s in indexed if s.offset in places and _same(s, places[s.offset])]
    tail = [one for one in found if one.offset >= row.size and one.sound]
    adopted = [one.stripe(row.file) for one in tail if one.header.owner == row.name]
    live = live_stripes([*kept, *adopted])
    end = max((s.offset + s.total for s in [*kept, *adopted]), default=0)
    problem = ""
    if size != row.size:
        problem = f"its file has {size} bytes, {row.size} in the index"
    elif len(kept) != len(indexed):
        problem = f"{len(indexed) - len(kept)} of {len(indexed)} stripes are damaged"
    elif row.live != entry.live or len(live) != len(indexed):
        problem = f"{row.live} bytes of live stripes in the index, {entry.live} in fact"
    if size >= row.size:
        end = max(end, row.size)
    return _State(live, end, problem)


def _same(stripe: Stripe, found: Found) -> bool:
    other = found.stripe(stripe.file)
    other.id = stripe.id
    return all(getattr(stripe, name) == getattr(other, name) for name in Stripe.__slots__)


def _apply(
    index: Index, files: ChunkFiles, row: OwnerRow, entry: OwnerEntry, state: _State, fd: int
) -> int:
    """Make index and file what `state` says; the file's bytes after it."""
    if not state.live:
        _delete(index, files, row)
        return 0
    os.fsync(fd)  # what is adopted may so far be in the page cache only
    gone = {stripe.id for stripe in entry.all()} - {stripe.id for stripe in state.live}
    with index.transaction():
        index.delete_stripes(gone)
        for stripe in state.live:
            if not stripe.id:
                index.add_stripe(row.id, stripe)
        index.set_file(row.id, row.file, state.size, sum(s.total for s in state.live))
    os.ftruncate(fd, state.size)
    os.fsync(fd)
    return state.size


def _delete(index: Index, files: ChunkFiles, row: OwnerRow) -> None:
    with index.transaction():
        index.delete_owners([row.id])
    files.remove(row.file)

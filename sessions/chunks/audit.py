"""Comparing the index with the files it names, and bringing the two into agreement."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sessions.chunks.catalog import OwnerEntry, Stripe, live_stripes
from sessions.chunks.files import ChunkFiles
from sessions.chunks.index import Index
from sessions.chunks.report import CheckReport
from sessions.chunks.rows import OwnerRow
from sessions.chunks.scan import Found, scan_file


def audit(
    index: Index, files: ChunkFiles, report: CheckReport, *, verify: bool, repair: bool
) -> int:
    """Compare every owner's row with its file, with `verify` every stripe; the files' bytes."""
    sizes = files.listing()
    total = sum(sizes.values())
    report.files_examined += len(sizes)
    for row in index.owners():
        size = sizes.pop(row.file, None)
        if size == row.size and not verify:
            continue
        entry = index.load(row.name)
        if size is None or entry is None:
            report.problems.append(f"{row.name}: its file {row.file} is missing")
            if repair:
                _delete(index, files, row)
                report.fixed.append(f"{row.name} forgotten")
        else:
            fd = files.open_write(row.file)
            try:
                found = scan_file(fd, 0 if verify or size < row.size else row.size)
                report.stripes_scanned += len(found)
                state = examine(row, entry, size, found, verify)
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
class Examined:
    """What an owner's file holds; `problem` is empty when the index says the same."""

    live: list[Stripe]
    size: int  # bytes to keep of the file
    problem: str


def examine(
    row: OwnerRow, entry: OwnerEntry, size: int, found: list[Found], verify: bool
) -> Examined:
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
    return Examined(live, end, problem)


def _same(stripe: Stripe, found: Found) -> bool:
    other = found.stripe(stripe.file)
    other.id = stripe.id
    return all(getattr(stripe, name) == getattr(other, name) for name in Stripe.__slots__)


def _apply(
    index: Index, files: ChunkFiles, row: OwnerRow, entry: OwnerEntry, state: Examined, fd: int
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

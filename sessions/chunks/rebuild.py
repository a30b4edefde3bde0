"""Making the index anew from the files, when it is missing or damaged."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from dataclasses import dataclass

from sessions.chunks.catalog import Stripe, live_stripes
from sessions.chunks.files import ChunkFiles
from sessions.chunks.index import Index
from sessions.chunks.report import CheckReport
from sessions.chunks.scan import scan_file

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Salvaged:
    """A file whose index was lost, and the stripes to enter."""

    owner: str
    file: str
    size: int  # bytes
    modified: float
    stripes: list[Stripe]


def _salvage(files: ChunkFiles, name: str, report: CheckReport) -> _Salvaged | None:
    """The live stripes of a file, cut after the last; None when there are none. Raises OSError."""
    fd = files.open_write(name)
    try:
        found = [one for one in scan_file(fd) if one.sound]
        report.stripes_scanned += len(found)
        if not found:
            return None
        owner = found[0].header.owner
        stripes = live_stripes(one.stripe(name) for one in found if one.header.owner == owner)
        size = max(stripe.offset + stripe.total for stripe in stripes)
        modified = os.fstat(fd).st_mtime
        # no fsync of each file: one that a second crash tears is told by its checksums when read
        os.ftruncate(fd, size)
        return _Salvaged(owner, name, size, modified, stripes)
    finally:
        os.close(fd)


def rebuild(files: ChunkFiles, report: CheckReport) -> Index:
    """A new index made from the files, in one transaction; files with nothing sound are removed.

    Raises OSError and sqlite3.Error.
    """
    problems = len(report.problems) - len(report.fixed)
    files.remove_index()
    by_owner: dict[str, list[_Salvaged]] = defaultdict(list)
    for name in files.listing():
        try:
            kept_here = _salvage(files, name, report)
        except OSError as error:
            log.warning("chunk store: %s cannot be read: %s", name, error)
            kept_here = None
        report.files_examined += 1
        if kept_here is None:
            files.remove(name)
        else:
            by_owner[kept_here.owner].append(kept_here)
    kept = []
    for copies in by_owner.values():
        # a killed compaction leaves two; the copy never has more than the file it was made from
        copies.sort(key=lambda copy: (len(copy.stripes), -copy.size))
        for copy in copies[:-1]:
            files.remove(copy.file)
        kept.append(copies[-1])
    kept.sort(key=lambda one: one.modified)
    index = Index(files.index_path)
    with index.transaction():
        index.create_schema()
        for tick, one in enumerate(kept):
            owner_id = index.add_owner(one.owner, one.file, tick)
            for stripe in one.stripes:
                index.add_stripe(owner_id, stripe)
            live = sum(stripe.total for stripe in one.stripes)
            index.set_file(owner_id, one.file, one.size, live)
        index.set_meta(clean=0, tick=len(kept), bytes=sum(one.size for one in kept))
    report.fixed.extend(f"index rebuilt from {len(kept)} files" for _ in range(problems))
    return index

"""A look at a store that another process has open: who takes how much, and whether it is sound."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from sessions.chunks.audit import examine
from sessions.chunks.files import INDEX_NAME
from sessions.chunks.index import Index
from sessions.chunks.report import CheckReport
from sessions.chunks.scan import scan_file

# Between two looks at what seems wrong: the store may be writing just that.
PAUSES_S = (0.05, 0.2, 1.0, 3.0)


def owner_sizes(directory: Path) -> dict[str, int]:
    """Bytes on disk of each owner; `directory` is the store's first one.

    Empty when there is no store. Raises sqlite3.Error.
    """
    path = directory / INDEX_NAME
    if not path.exists():
        return {}
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=2)) as db:
        db.text_factory = lambda raw: raw.decode(errors="replace")
        return dict(db.execute("SELECT name, size FROM owner"))


def check_open(
    dirs: Sequence[Path], *, pauses_s: Sequence[float] = PAUSES_S
) -> tuple[CheckReport, list[str]]:
    """Compare the index with every byte of the files, as `check` does, and change nothing.

    What seems wrong is looked at again after each pause. Returns the report and the owners of
    which something is wrong. Raises OSError and sqlite3.Error.
    """
    report, bad = CheckReport(), []
    if not (dirs[0] / INDEX_NAME).exists():
        return report, []
    index = Index(dirs[0] / INDEX_NAME)
    try:
        report.owner_names = sorted(row.name for row in index.owners())
        report.owners = len(report.owner_names)
        for name in report.owner_names:
            problem = _problem(index, dirs, name, report)
            for pause_s in pauses_s:
                if problem:
                    time.sleep(pause_s)
                    problem = _problem(index, dirs, name, report)
            if problem:
                bad.append(name)
                report.problems.append(f"{name}: {problem}")
        unowned = _unowned(index, dirs)
        for pause_s in pauses_s:
            if unowned:
                time.sleep(pause_s)
                unowned &= _unowned(index, dirs)
        report.problems += [
            f"{name} belongs to no owner; the next start removes it" for name in sorted(unowned)
        ]
        report.stripes = index.num_stripes()
        report.bytes = sum(size for _, size in _listing(dirs))
    finally:
        index.close()
    return report, bad


def _problem(index: Index, dirs: Sequence[Path], name: str, report: CheckReport) -> str:
    """What is wrong with an owner's file; "" when nothing is, or the owner is gone by now."""
    row = index.find_owner(name)
    entry = index.load(name)
    if row is None or entry is None:
        return ""
    places = (directory / Path(row.file).name for directory in dirs)
    path = next((place for place in places if place.exists()), None)
    if path is None:
        return f"its file {row.file} is missing"
    report.files_examined += 1
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        found = scan_file(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    report.stripes_scanned += len(found)
    return examine(row, entry, size, found, True).problem


def _unowned(index: Index, dirs: Sequence[Path]) -> set[str]:
    """Files first: one that is made in between is not among them."""
    names = {name for name, _ in _listing(dirs)}
    return names - {row.file for row in index.owners()}


def _listing(dirs: Sequence[Path]) -> list[tuple[str, int]]:
    found = []
    for directory in dirs:
        for path in directory.glob("*.chunks"):
            try:
                found.append((path.name, path.stat().st_size))
            except FileNotFoundError:
                continue  # deleted meanwhile
    return found

"""Bringing index and files into agreement: at start, after an unclean end, and when asked."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from sessions.chunks.audit import audit
from sessions.chunks.files import ChunkFiles
from sessions.chunks.index import SCHEMA_VERSION, Index
from sessions.chunks.rebuild import rebuild
from sessions.chunks.report import CheckReport
from sessions.chunks.rows import is_damage


def check(dirs: Sequence[Path], *, repair: bool = False) -> CheckReport:
    """Compare the index with every byte of the files, of a store that no process has open.

    With `repair` what does not agree is put right: in doubt a stripe is lost, never wrong. Raises
    StoreLockedError and OSError.
    """
    files = ChunkFiles(dirs)
    try:
        report = CheckReport()
        index = open_sound(files, report)
        if index is not None:
            try:
                _check_opened(index, files, report, repair)
                return report
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                report.problems.append(f"the index is damaged: {error}")
            finally:
                index.close()
        if repair and report.problems:
            index = rebuild(files, report)
            try:
                _check_opened(index, files, report, repair)
            finally:
                index.close()
        else:
            report.bytes = sum(files.listing().values())
        return report
    finally:
        files.unlock()


def _check_opened(index: Index, files: ChunkFiles, report: CheckReport, repair: bool) -> None:
    if not index.get_meta("clean"):
        report.problems.append("the store was not closed")
    total = audit(index, files, report, verify=True, repair=repair)
    counted = index.get_meta("bytes")
    if index.get_meta("clean") and counted != total:
        report.problems.append(f"{counted} bytes counted, {total} bytes in files")
    if repair:
        with index.transaction():
            index.set_meta(clean=1, bytes=total)
        index.truncate_log()
        report.fixed.extend(["noted"] * (len(report.problems) - len(report.fixed)))


def open_index(files: ChunkFiles, report: CheckReport) -> tuple[Index, bool]:
    """The index, in agreement with the files, and whether the last end was a clean one.

    After a clean end nothing is compared here, so that the time does not grow with the owners; the
    caller still owes an `audit`. Raises OSError and sqlite3.Error.
    """
    index = open_sound(files, report)
    if index is not None:
        try:
            clean = bool(index.get_meta("clean"))
            if not clean:
                audit(index, files, report, verify=False, repair=True)
            with index.transaction():
                index.set_meta(clean=0)
            return index, clean
        except sqlite3.DatabaseError as error:
            index.close()
            if not is_damage(error):
                raise
            report.problems.append(f"the index is damaged: {error}")
    return rebuild(files, report), False


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

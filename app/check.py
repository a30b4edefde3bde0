"""Reconciles database, index and chunk files of a data directory that no server uses."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field

from app.settings import MIB, Settings
from sessions.chunks import ChunkStore, check

_CHAT = "c-"  # what the owner of a chat's checkpoints begins with; others are shared prefixes


@dataclass
class Findings:
    """What a check has to say: facts, and faults of which some may have been put right."""

    facts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return len(self.faults) == len(self.fixed)


def check_data(settings: Settings, *, repair: bool) -> Findings:
    """Check the database and every byte of the checkpoints.

    With `repair` checkpoints are put right: in doubt one is dropped, which costs time later but no
    data. Raises StoreLockedError, OSError and sqlite3.Error.
    """
    findings = Findings()
    chat_ids = check_database(settings, findings)
    _check_chunks(settings, chat_ids, findings, repair=repair)
    return findings


def check_database(settings: Settings, findings: Findings) -> set[str]:
    """Look for damage; returns the ids of all chats."""
    uri = f"{settings.database_path.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as db:
        damage = [row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        dangling = db.execute("PRAGMA foreign_key_check").fetchall()
        chat_ids = {row[0] for row in db.execute("SELECT id FROM chat")}
        hidden = {row[0] for row in db.execute("SELECT DISTINCT chat_id FROM api_state")}
        (messages,) = db.execute("SELECT count(*) FROM message").fetchone()
    findings.facts.append(f"database: {len(chat_ids)} chats, {messages} messages")
    findings.faults += [f"database: {line}" for line in damage]
    findings.faults += [
        f"database: row {row} of {table} refers to a missing row of {parent}"
        for table, row, parent, _ in dangling
    ]
    return chat_ids | hidden


def _check_chunks(
    settings: Settings, chat_ids: set[str], findings: Findings, *, repair: bool
) -> None:
    dirs = [path for path in settings.chunk_dirs if path.is_dir()]
    if len(dirs) < len(settings.chunk_dirs):
        missing = [str(path) for path in settings.chunk_dirs if not path.is_dir()]
        findings.facts.append(f"checkpoints: nothing in {', '.join(missing)} yet")
    if not dirs:
        return
    report = check(dirs, repair=repair)
    findings.facts.append(
        f"checkpoints: {report.owners} chats and prefixes, {report.stripes} stripes, "
        f"{report.bytes / MIB:.1f} MiB of at most {settings.checkpoint_cap_mib} MiB"
    )
    findings.faults += [f"checkpoints: {problem}" for problem in report.problems]
    findings.fixed += [f"checkpoints: {what}" for what in report.fixed]
    orphans = [
        name
        for name in report.owner_names
        if name.startswith(_CHAT) and name.removeprefix(_CHAT) not in chat_ids
    ]
    findings.faults += [f"checkpoints: {name} is of a chat that is gone" for name in orphans]
    if orphans and repair:
        store = ChunkStore(dirs, cap_bytes=settings.checkpoint_cap_mib * MIB)
        try:
            store.forget(orphans)
        finally:
            store.close()
        findings.fixed += [f"checkpoints: {name} forgotten" for name in orphans]

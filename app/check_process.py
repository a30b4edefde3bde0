"""Checks the data directory of a running server. Run by the operator's page, never by hand.

A process of its own, because reading every checkpoint takes a while: settings come as JSON on
standard input, the findings go as JSON to standard output. Nothing is changed.
"""

from __future__ import annotations

import os
import sqlite3
import sys

import msgspec

from app.check import Findings, check_database
from app.settings import MIB, Settings
from sessions.chunks import check_open

NICE = 15


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was found; `error` says why nothing could be."""

    facts: list[str] = []
    faults: list[str] = []
    bad_owners: list[str] = []  # of the store: dropping them puts their faults right
    error: str = ""


def check_running(settings: Settings) -> Checked:
    """As `check_data`, beside the server that uses the data. Raises OSError and sqlite3.Error."""
    findings = Findings()
    check_database(settings, findings)
    dirs = [path for path in settings.chunk_dirs if path.is_dir()]
    bad: list[str] = []
    if dirs:
        report, bad = check_open(dirs)
        findings.facts.append(
            f"checkpoints: {report.owners} chats and prefixes, {report.stripes} stripes, "
            f"{report.bytes / MIB:.1f} MiB of at most {settings.checkpoint_cap_mib} MiB"
        )
        findings.faults += [f"checkpoints: {problem}" for problem in report.problems]
    return Checked(facts=findings.facts, faults=findings.faults, bad_owners=bad)


def main() -> int:
    """Check and print; returns the exit code."""
    os.nice(NICE)
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    try:
        checked = check_running(settings)
    except (OSError, sqlite3.Error) as error:
        checked = Checked(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(checked))
    return 0


if __name__ == "__main__":
    sys.exit(main())

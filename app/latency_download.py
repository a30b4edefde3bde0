"""Turns one by one as CSV or JSON, written as they are read: no size is too large."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from sessions.latency_records import TurnRecord
from sessions.records import Latency

# Spans are lists of lists: in JSON only.
MEASURES = tuple(one for one in Latency.__dataclass_fields__ if one != "restore_spans")
COLUMNS = (
    "started_at",
    "ended_at",
    "outcome",
    "without_first_token",
    "origin",
    "first_token_ms",
    *MEASURES,
)


async def as_csv(pages: AsyncIterator[list[TurnRecord]]) -> AsyncGenerator[str, None]:
    """A head and one line for each turn; what was not measured is empty."""
    yield _lines([COLUMNS])
    async for page in pages:
        yield _lines([[_value(row[name]) for name in COLUMNS] for row in map(_row, page)])


async def as_json(pages: AsyncIterator[list[TurnRecord]]) -> AsyncGenerator[str, None]:
    """One array, an object for each turn; what was not measured is null."""
    before = "[\n"
    async for page in pages:
        for turn in page:
            row = _row(turn)
            row["restore_spans"] = turn.latency.restore_spans if turn.latency else None
            yield before + msgspec.json.encode(row).decode()
            before = ",\n"
    yield "[]\n" if before == "[\n" else "\n]\n"


def _row(turn: TurnRecord) -> dict[str, Any]:
    """Nothing that names a chat or its user."""
    measured = {name: getattr(turn.latency, name, None) for name in MEASURES}
    return {
        "started_at": turn.created_at,
        "ended_at": turn.ended_at,
        "outcome": turn.outcome,
        "without_first_token": turn.without_first_token,
        "origin": turn.kind,
        "first_token_ms": turn.first_token_ms,
        **measured,
    }


def _value(value: object) -> object:
    if value is None:
        return ""
    return value.isoformat() if hasattr(value, "isoformat") else value


def _lines(rows: Any) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()

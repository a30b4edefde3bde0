"""Search over titles and messages: FTS5 indices over trigrams, kept in step by triggers.

A term is found wherever its characters stand, within words too, whatever their case. A trigram
index cannot be asked for fewer than three characters; a shorter term is the sum of the trigrams
that begin with it (two blanks end each indexed text, so every character begins one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions.column_types import UtcDateTime
from sessions.folding import fold
from sessions.history_records import SearchHit

TRIGRAM = 3
MAX_EXPANDED = 500  # trigrams that one short term may stand for
SCANNED = 20_000  # latest texts that are read for short terms that stand for more

_MESSAGES = """
    SELECT entry.id AS place, chat.id AS chat_id, chat.title AS chat_title,
        chat.updated_at AS chat_updated_at, message.id AS message_id, message.role AS role,
        message.text AS text, message.created_at AS created_at
    FROM {source}
    CROSS JOIN chat ON chat.id = entry.chat_id
    CROSS JOIN message ON message.id = entry.message_id
    WHERE {conditions} AND chat.user_id = :user_id AND chat.deleted_at IS NULL
        AND chat.origin = 'browser'
    ORDER BY {place} DESC LIMIT :limit
"""
_TITLES = """
    SELECT entry.id AS place, chat.id AS chat_id, chat.title AS chat_title,
        chat.updated_at AS chat_updated_at
    FROM {source}
    CROSS JOIN chat ON chat.id = entry.chat_id
    WHERE {conditions} AND entry.message_id IS NULL
        AND chat.user_id = :user_id AND chat.deleted_at IS NULL AND chat.origin = 'browser'
    ORDER BY chat.updated_at DESC, chat.id LIMIT :limit
"""
# Those of the messages that are on the branch that their chat shows.
_ACTIVE = """
    WITH RECURSIVE step (id, parent_id) AS (
        SELECT message.id, message.parent_id FROM chat
        JOIN message ON message.id = chat.active_leaf_id WHERE chat.id IN :chat_ids
        UNION ALL
        SELECT message.id, message.parent_id FROM step
        JOIN message ON message.id = step.parent_id
    )
    SELECT id FROM step WHERE id IN :message_ids
"""


async def titles(
    db: AsyncConnection, user_id: str, terms: Sequence[str], limit: int
) -> list[SearchHit]:
    plan = await _plan(db, "title", "chat.title", terms)
    if plan is None:
        return []
    return await _hits(db, _TITLES, plan, {"user_id": user_id, "limit": limit})


async def messages(
    db: AsyncConnection, user_id: str, terms: Sequence[str], limit: int, before: int | None
) -> list[SearchHit]:
    plan = await _plan(db, "message", "message.text", terms)
    if plan is None:
        return []
    values: dict[str, Any] = {"user_id": user_id, "limit": limit}
    if before is not None:
        plan.conditions.append(f"{plan.place} < :before")
        values["before"] = before
    hits = await _hits(db, _MESSAGES, plan, values)
    active = await _active(db, hits)
    return [hit if hit.message_id in active else _aside(hit) for hit in hits]


@dataclass
class _Plan:
    """Where the texts come from and which of them count."""

    source: str
    place: str
    conditions: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


async def _plan(db: AsyncConnection, name: str, column: str, terms: Sequence[str]) -> _Plan | None:
    """None when a term is nowhere."""
    indexed: list[str] = []
    frequent: list[str] = []
    for term in terms:
        if len(term) >= TRIGRAM:
            indexed.append(_quoted(term))
            continue
        if len(term) == 1 and term.isascii() and term.isalnum():
            frequent.append(fold(term))  # without asking: to count its trigrams takes longest
            continue
        trigrams = await _trigrams(db, name, fold(term))
        if not trigrams:
            return None
        if len(trigrams) > MAX_EXPANDED:
            frequent.append(fold(term))
        else:
            indexed.append("(" + " OR ".join(map(_quoted, trigrams)) + ")")
    if indexed:
        plan = _Plan(
            f"{name}_search AS found CROSS JOIN search_entry AS entry ON entry.id = found.rowid",
            "found.rowid",
            [f"found.{name}_search MATCH :expression"],
            {"expression": " AND ".join(indexed)},
        )
    else:
        latest = f"entry.id > (SELECT max(id) FROM search_entry) - {SCANNED}"
        plan = _Plan("search_entry AS entry", "entry.id", [latest])
    for number, term in enumerate(frequent):
        ways = []
        for way, spelled in enumerate(_spellings(term)):
            key = f"frequent_{number}_{way}"
            ways.append(f"instr({column}, :{key}) > 0")
            plan.values[key] = spelled
        plan.conditions.append("(" + " OR ".join(ways) + ")")
    return plan


async def _trigrams(db: AsyncConnection, name: str, start: str) -> list[str]:
    """The index's trigrams that begin so; one more than the limit when there are too many."""
    rows = await db.exec_driver_sql(
        f"SELECT term FROM {name}_terms WHERE term >= ? AND term < ? LIMIT ?",
        (start, start + "\U0010ffff", MAX_EXPANDED + 1),
    )
    return [row.term for row in rows]


async def _hits(
    db: AsyncConnection, query: str, plan: _Plan, values: Mapping[str, Any]
) -> list[SearchHit]:
    filled = query.format(
        source=plan.source, place=plan.place, conditions=" AND ".join(plan.conditions)
    )
    rows = await db.execute(
        text(filled).columns(chat_updated_at=UtcDateTime(), created_at=UtcDateTime()),
        {**plan.values, **values},
    )
    return [SearchHit(**row) for row in rows.mappings()]


async def _active(db: AsyncConnection, hits: Sequence[SearchHit]) -> set[str]:
    if not hits:
        return set()
    query = text(_ACTIVE).bindparams(
        bindparam("chat_ids", expanding=True), bindparam("message_ids", expanding=True)
    )
    rows = await db.execute(
        query,
        {
            "chat_ids": list({hit.chat_id for hit in hits}),
            "message_ids": [hit.message_id for hit in hits],
        },
    )
    return {row.id for row in rows}


def _aside(hit: SearchHit) -> SearchHit:
    return replace(hit, active=False)


def _quoted(term: str) -> str:
    """The term as an FTS5 string: nothing in it is an operator."""
    return '"' + term.replace('"', '""') + '"'


def _spellings(term: str) -> set[str]:
    """A short term in each mixture of lower and upper case."""
    cases = ({char, up} if len(up := char.upper()) == 1 else {char} for char in term)
    return {"".join(chars) for chars in product(*cases)}

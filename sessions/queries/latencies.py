"""Measurements of turns, one by one."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, Select, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.latency_records import TurnRecord
from sessions.records import Latency, TurnLatency

_MEASURES = tuple(field.name for field in fields(Latency))
_COLUMNS = (
    models.Turn.id.label("turn_id"),
    models.Turn.chat_id,
    models.Turn.message_id,
    models.Turn.created_at,
    *(getattr(models.TurnLatency, name) for name in _MEASURES),
)


async def of_chat(db: AsyncConnection, chat_id: str) -> list[TurnLatency]:
    query = (
        select(*_COLUMNS)
        .join(models.TurnLatency, models.TurnLatency.turn_id == models.Turn.id)
        .where(models.Turn.chat_id == chat_id)
        .order_by(models.Turn.created_at)
    )
    return [
        TurnLatency(
            turn_id=row["turn_id"],
            chat_id=row["chat_id"],
            message_id=row["message_id"],
            created_at=row["created_at"],
            latency=_latency(row),
        )
        for row in (await db.execute(query)).mappings()
    ]


async def number_of_turns(db: AsyncConnection, chat_id: str) -> int:
    query = select(func.count()).select_from(models.Turn).where(models.Turn.chat_id == chat_id)
    return await db.scalar(query) or 0


async def page_of_chat(
    db: AsyncConnection, chat_id: str, *, first: int, limit: int
) -> list[TurnRecord]:
    return await _turns(db, chat_query(chat_id, first=first, limit=limit))


async def since(
    db: AsyncConnection, begun: datetime, after: tuple[datetime, str] | None, limit: int
) -> list[TurnRecord]:
    return await _turns(db, since_query(begun, after=after, limit=limit))


def chat_query(chat_id: str, *, first: int, limit: int) -> Select[*tuple[Any, ...]]:
    """`limit` turns of a chat from number `first` (0 is the oldest), oldest first."""
    return (
        _turns_query()
        .where(models.Turn.chat_id == chat_id)
        .order_by(models.Turn.created_at, models.Turn.id)
        .offset(first)
        .limit(limit)
    )


def since_query(
    begun: datetime, *, after: tuple[datetime, str] | None, limit: int
) -> Select[*tuple[Any, ...]]:
    """`limit` turns of all users from a time on, oldest first; those `after` the last one known."""
    place = tuple_(models.Turn.created_at, models.Turn.id)
    query = _turns_query().order_by(models.Turn.created_at, models.Turn.id).limit(limit)
    if after is None:
        return query.where(models.Turn.created_at >= begun)
    return query.where(place > tuple_(*after))


def _turns_query() -> Select[*tuple[Any, ...]]:
    return select(
        *_COLUMNS,
        models.Turn.ended_at,
        models.Turn.outcome,
        models.Turn.first_token_ms,
        models.TurnLatency.turn_id.label("measured"),
    ).outerjoin(models.TurnLatency, models.TurnLatency.turn_id == models.Turn.id)


async def _turns(db: AsyncConnection, query: Select[*tuple[Any, ...]]) -> list[TurnRecord]:
    return [
        TurnRecord(
            turn_id=row["turn_id"],
            chat_id=row["chat_id"],
            message_id=row["message_id"],
            created_at=row["created_at"],
            ended_at=row["ended_at"],
            outcome=row["outcome"],
            first_token_ms=row["first_token_ms"],
            latency=None if row["measured"] is None else _latency(row),
        )
        for row in (await db.execute(query)).mappings()
    ]


def _latency(row: RowMapping) -> Latency:
    return Latency(**{name: row[name] for name in _MEASURES})

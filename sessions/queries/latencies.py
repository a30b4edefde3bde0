"""Measurements of turns."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.records import Latency, TurnLatency

_MEASURES = tuple(field.name for field in fields(Latency))


async def of_chat(db: AsyncConnection, chat_id: str) -> list[TurnLatency]:
    query = _query().where(models.Turn.chat_id == chat_id).order_by(models.Turn.created_at)
    return await _records(db, query)


async def recent(db: AsyncConnection, limit: int, since: datetime | None) -> list[TurnLatency]:
    query = _query().order_by(models.Turn.created_at.desc()).limit(limit)
    if since is not None:
        query = query.where(models.Turn.created_at >= since)
    return (await _records(db, query))[::-1]


def _query() -> Select[*tuple[Any, ...]]:
    return select(
        models.Turn.id.label("turn_id"),
        models.Turn.chat_id,
        models.Turn.message_id,
        models.Turn.created_at,
        *(getattr(models.TurnLatency, name) for name in _MEASURES),
    ).join(models.TurnLatency, models.TurnLatency.turn_id == models.Turn.id)


async def _records(db: AsyncConnection, query: Select[*tuple[Any, ...]]) -> list[TurnLatency]:
    return [
        TurnLatency(
            turn_id=row["turn_id"],
            chat_id=row["chat_id"],
            message_id=row["message_id"],
            created_at=row["created_at"],
            latency=Latency(**{name: row[name] for name in _MEASURES}),
        )
        for row in (await db.execute(query)).mappings()
    ]

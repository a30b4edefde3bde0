"""What stateless calls of the API left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import delete, insert, select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.records import ApiState


async def all_states(db: AsyncConnection) -> list[ApiState]:
    rows = await db.execute(select(models.ApiState.__table__))
    return [ApiState(**row) for row in rows.mappings()]


async def used_before(db: AsyncConnection, at: float) -> list[str]:
    return list(await db.scalars(select(models.ApiState.id).where(models.ApiState.used_at < at)))


async def keep(db: AsyncConnection, state: ApiState, replaces: str | None) -> None:
    if replaces is not None:
        await db.execute(delete(models.ApiState).where(models.ApiState.id == replaces))
    await db.execute(insert(models.ApiState).values(asdict(state)))


async def drop(db: AsyncConnection, state_ids: Sequence[str]) -> None:
    state = models.ApiState
    chat_ids = set(await db.scalars(select(state.chat_id).where(state.id.in_(state_ids))))
    await db.execute(delete(state).where(state.id.in_(state_ids)))
    left = set(await db.scalars(select(state.chat_id).where(state.chat_id.in_(chat_ids))))
    for chat_id in chat_ids - left:
        await db.execute(
            upsert(models.ChatToForget).values(chat_id=chat_id).on_conflict_do_nothing()
        )

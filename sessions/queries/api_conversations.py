"""Conversations of the API: a chat under a name, and items that wait for their answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import TurnRunning
from sessions.queries.ids import new_id
from sessions.records import ApiConversation, ApiItem


async def create_conversation(
    db: AsyncConnection,
    user_id: str,
    items: Sequence[ApiItem],
    labels: Mapping[str, str],
    now: datetime,
) -> ApiConversation:
    made = ApiConversation(
        id=new_id(),
        user_id=user_id,
        chat_id=None,
        leaf_id=None,
        items=list(items),
        labels=dict(labels),
        version=0,
        created_at=now,
    )
    await db.execute(
        insert(models.ApiConversation).values({**asdict(made), "items": _plain(items)})
    )
    return made


async def conversation(
    db: AsyncConnection, user_id: str, conversation_id: str
) -> ApiConversation | None:
    table = models.ApiConversation
    row = (
        (
            await db.execute(
                select(table.__table__).where(table.id == conversation_id, table.user_id == user_id)
            )
        )
        .mappings()
        .one_or_none()
    )
    if row is None:
        return None
    return ApiConversation(**{**row, "items": [ApiItem(**item) for item in row["items"]]})


async def change_conversation(
    db: AsyncConnection,
    known: ApiConversation,
    *,
    chat_id: str | None,
    leaf_id: str | None,
    items: Sequence[ApiItem],
    labels: Mapping[str, str] | None = None,
) -> bool:
    """False, and nothing is changed, when it is not as it is `known` any more."""
    table = models.ApiConversation
    done = await db.execute(
        update(table)
        .where(table.id == known.id, table.version == known.version)
        .values(
            chat_id=chat_id,
            leaf_id=leaf_id,
            items=_plain(items),
            labels=dict(known.labels if labels is None else labels),
            version=known.version + 1,
        )
    )
    return done.rowcount > 0


async def leave_chat(
    db: AsyncConnection, known: ApiConversation, items: Sequence[ApiItem], now: datetime
) -> bool:
    """Go back to items only: the next answer begins another chat with them."""
    if known.chat_id is not None:
        await not_running(db, known.chat_id)
    if not await change_conversation(db, known, chat_id=None, leaf_id=None, items=items):
        return False
    if known.chat_id is not None:
        await delete_unused(db, known.chat_id, now)
    return True


async def delete_conversation(
    db: AsyncConnection, user_id: str, conversation_id: str, now: datetime
) -> bool:
    found = await conversation(db, user_id, conversation_id)
    if found is None:
        return False
    await db.execute(
        delete(models.ApiConversation).where(models.ApiConversation.id == conversation_id)
    )
    if found.chat_id is not None:
        await delete_unused(db, found.chat_id, now)
    return True


async def not_running(db: AsyncConnection, chat_id: str) -> None:
    """Raises TurnRunning."""
    running = await db.scalar(select(models.Chat.running_group_id).where(models.Chat.id == chat_id))
    if running is not None:
        raise TurnRunning(chat_id)


async def delete_unused(db: AsyncConnection, chat_id: str, now: datetime) -> None:
    """Delete a chat that neither a response nor a conversation refers to; it is purged later."""
    for table in (models.ApiResponse, models.ApiConversation):
        if await db.scalar(select(table.id).where(table.chat_id == chat_id).limit(1)):
            return
    await db.execute(update(models.Chat).where(models.Chat.id == chat_id).values(deleted_at=now))


def _plain(items: Sequence[ApiItem]) -> list[dict[str, Any]]:
    return [{"id": item.id, "role": item.role, "text": item.text} for item in items]

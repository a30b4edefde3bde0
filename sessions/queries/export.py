"""Whole chats as they leave the server."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.history_records import ExportedChat, ExportedMessage
from sessions.queries import chats


async def chat_ids(db: AsyncConnection, user_id: str) -> list[str]:
    return list(
        await db.scalars(
            select(models.Chat.id)
            .where(models.Chat.user_id == user_id, models.Chat.deleted_at.is_(None))
            .where(models.Chat.origin == chats.LISTED)
            .order_by(models.Chat.created_at, models.Chat.id)
        )
    )


async def chat(db: AsyncConnection, user_id: str, chat_id: str) -> ExportedChat | None:
    found = await chats.owned(db, user_id, chat_id)
    if found is None:
        return None
    message = models.Message
    rows = await db.execute(
        select(
            message.id,
            message.parent_id,
            message.role,
            message.text,
            message.status,
            message.finish_reason,
            message.error,
            message.created_at,
            message.completed_at,
        )
        .where(message.chat_id == chat_id)
        # A question and its answer have one time, and so have several answers to it.
        .order_by(message.created_at, message.role.desc(), message.candidate, message.id)
    )
    return ExportedChat(
        id=found.id,
        title=found.title,
        pinned=found.pinned,
        created_at=found.created_at,
        updated_at=found.updated_at,
        assistant_name=found.assistant_name,
        assistant_version=found.assistant_version,
        active_leaf_id=found.active_leaf_id,
        messages=[ExportedMessage(**row) for row in rows.mappings()],
    )

"""Chats that come from elsewhere, each in one transaction and once."""

from __future__ import annotations

from sqlalchemy import and_, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import NotFound
from sessions.history_records import Imported, NewChat
from sessions.queries.ids import new_id


async def add(db: AsyncConnection, user_id: str, prefix_id: str, chat: NewChat) -> Imported:
    known = await _known(db, user_id, chat)
    if known is not None:
        return known
    if await db.scalar(select(models.Prefix.id).where(models.Prefix.id == prefix_id)) is None:
        raise NotFound("prefix", prefix_id)
    chat_id = new_id()
    ids = [new_id() for _ in chat.messages]
    await db.execute(
        insert(models.Chat).values(
            id=chat_id,
            user_id=user_id,
            prefix_id=prefix_id,
            title=chat.title,
            pinned=chat.pinned,
            created_at=chat.created_at,
            updated_at=chat.updated_at,
            import_key=chat.key,
        )
    )
    await db.execute(
        insert(models.Message),
        [
            {
                "id": message_id,
                "chat_id": chat_id,
                "parent_id": None if message.parent is None else ids[message.parent],
                "role": message.role,
                "text": message.text,
                "token_ids": message.token_ids,
                "status": message.status,
                "finish_reason": message.finish_reason,
                "error": message.error,
                "created_at": message.created_at,
                "completed_at": message.completed_at,
            }
            for message_id, message in zip(ids, chat.messages, strict=True)
        ],
    )
    await db.execute(
        update(models.Chat)
        .where(models.Chat.id == chat_id)
        .values(active_leaf_id=ids[chat.active_leaf])
    )
    return Imported(chat_id=chat_id, how="new")


async def _known(db: AsyncConnection, user_id: str, chat: NewChat) -> Imported | None:
    """The chat that was imported before, or the one that it was exported from."""
    table = models.Chat
    same = table.import_key == chat.key
    if chat.origin_id is not None:
        same = or_(same, table.id == chat.origin_id)
    row = (
        await db.execute(
            select(table.id, table.deleted_at)
            .where(and_(table.user_id == user_id, same))
            .order_by(table.deleted_at.is_not(None))
            .limit(1)
        )
    ).one_or_none()
    if row is None:
        return None
    if row.deleted_at is None:
        return Imported(chat_id=row.id, how="known")
    await db.execute(update(table).where(table.id == row.id).values(deleted_at=None))
    return Imported(chat_id=row.id, how="restored")

"""What a user has: all of it handed to another user, or let go."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.queries import path_marks, people_assistants


async def num_chats(db: AsyncConnection, user_id: str) -> int:
    number = await db.scalar(
        select(func.count())
        .select_from(models.Chat)
        .where(models.Chat.user_id == user_id, models.Chat.deleted_at.is_(None))
    )
    return number or 0


async def running_chats(db: AsyncConnection, user_id: str) -> list[str]:
    return list(
        await db.scalars(
            select(models.Chat.id).where(
                models.Chat.user_id == user_id, models.Chat.running_group_id.is_not(None)
            )
        )
    )


async def hand_over(db: AsyncConnection, user_id: str, to: str) -> None:
    """Chats, deleted ones too, assistants, and all of the API."""
    handed = list(await db.scalars(select(models.Chat.id).where(models.Chat.user_id == user_id)))
    theirs = select(models.Chat.import_key).where(
        models.Chat.user_id == to, models.Chat.import_key.is_not(None)
    )
    # Both imported the same chat: it is there twice from now on.
    await db.execute(
        update(models.Chat)
        .where(models.Chat.user_id == user_id, models.Chat.import_key.in_(theirs))
        .values(import_key=None)
    )
    for table in (
        models.Chat,
        models.ApiKey,
        models.ApiConversation,
        models.ApiResponse,
        models.ApiState,
    ):
        await db.execute(update(table).where(table.user_id == user_id).values(user_id=to))
    await db.execute(
        update(models.Assistant).where(models.Assistant.owner_id == user_id).values(owner_id=to)
    )
    for chat_id in handed:
        await path_marks.note_again(db, chat_id)


async def let_go(db: AsyncConnection, user_id: str, now: datetime) -> None:
    """Keys end, what the API keeps goes; chats and the user's assistants are deleted.

    The purge takes the chats, and with its last chat what an assistant says.
    """
    await db.execute(
        update(models.ApiKey)
        .where(models.ApiKey.user_id == user_id, models.ApiKey.revoked_at.is_(None))
        .values(revoked_at=now)
    )
    for table in (models.ApiConversation, models.ApiResponse, models.ApiState):
        await db.execute(delete(table).where(table.user_id == user_id))
    await db.execute(
        update(models.Chat)
        .where(models.Chat.user_id == user_id, models.Chat.deleted_at.is_(None))
        .values(deleted_at=now)
    )
    own = select(models.Assistant.id).where(
        models.Assistant.owner_id == user_id, models.Assistant.published.is_(False)
    )
    for assistant_id in list(await db.scalars(own)):
        await people_assistants.delete(db, assistant_id, now)

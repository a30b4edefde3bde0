"""The message that waits for the end of an answer, one a chat."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import AlreadyQueued, NotFound, NotRunning
from sessions.records import QueuedMessage

_COLUMNS = (
    models.QueuedMessage.chat_id,
    models.QueuedMessage.text,
    models.QueuedMessage.problem,
    models.QueuedMessage.created_at,
)


async def put(db: AsyncConnection, chat_id: str, text: str, now: datetime) -> None:
    chat = (
        await db.execute(select(models.Chat.running_group_id).where(models.Chat.id == chat_id))
    ).one_or_none()
    if chat is None:
        raise NotFound("chat", chat_id)
    if await of_chat(db, chat_id) is not None:
        raise AlreadyQueued(chat_id)
    if chat.running_group_id is None:
        raise NotRunning(chat_id)
    await db.execute(
        insert(models.QueuedMessage).values(chat_id=chat_id, text=text, created_at=now)
    )


async def of_chat(db: AsyncConnection, chat_id: str) -> QueuedMessage | None:
    row = (
        (await db.execute(select(*_COLUMNS).where(models.QueuedMessage.chat_id == chat_id)))
        .mappings()
        .one_or_none()
    )
    return None if row is None else QueuedMessage(**row)


async def waiting(db: AsyncConnection) -> list[str]:
    """Chats whose message waits for an answer's end, and not for its user."""
    return list(
        await db.scalars(
            select(models.QueuedMessage.chat_id)
            .where(models.QueuedMessage.problem.is_(None))
            .order_by(models.QueuedMessage.created_at)
        )
    )


async def set_problem(db: AsyncConnection, chat_id: str, problem: str | None) -> None:
    await db.execute(
        update(models.QueuedMessage)
        .where(models.QueuedMessage.chat_id == chat_id)
        .values(problem=problem)
    )


async def take(db: AsyncConnection, chat_id: str) -> str | None:
    """Remove the message; returns its text."""
    text: str | None = await db.scalar(
        delete(models.QueuedMessage)
        .where(models.QueuedMessage.chat_id == chat_id)
        .returning(models.QueuedMessage.text)
    )
    return text

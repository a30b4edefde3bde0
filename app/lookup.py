"""Whose a turn or an answer is: from the ids in addresses to chats of the asking user."""

from __future__ import annotations

from sqlalchemy import select

from sessions import models
from sessions.database import Database


async def turn_place(database: Database, user_id: str, turn_id: str) -> tuple[str, str] | None:
    """(chat id, answer's message id) of a turn; None when it is not this user's."""
    query = (
        select(models.Turn.chat_id, models.Turn.message_id)
        .join(models.Chat, models.Chat.id == models.Turn.chat_id)
        .where(models.Turn.id == turn_id, models.Chat.user_id == user_id)
    )
    async with database.read() as db:
        row = (await db.execute(query)).one_or_none()
    return None if row is None else (row.chat_id, row.message_id)


async def chat_of_message(database: Database, user_id: str, message_id: str) -> str | None:
    """The chat of a message; None when it is not this user's."""
    query = (
        select(models.Message.chat_id)
        .join(models.Chat, models.Chat.id == models.Message.chat_id)
        .where(models.Message.id == message_id, models.Chat.user_id == user_id)
    )
    async with database.read() as db:
        chat_id: str | None = await db.scalar(query)
    return chat_id

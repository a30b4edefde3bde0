"""A chat that begins with what another one ended with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.queries import chats
from sessions.queries.ids import new_id
from sessions.records import Carried, CarriedMessage


async def create(
    db: AsyncConnection,
    user_id: str,
    prefix_id: str,
    title: str,
    messages: Sequence[CarriedMessage],
    carried: Carried,
    now: datetime,
) -> str:
    chat = await chats.create(db, user_id, prefix_id, title, now)
    ids = [new_id() for _ in messages]
    if messages:
        await db.execute(
            insert(models.Message),
            [
                {
                    "id": message_id,
                    "chat_id": chat.id,
                    "parent_id": parent_id,
                    "role": message.role,
                    "text": message.text,
                    "token_ids": message.token_ids,
                    "status": "complete",
                    "created_at": now,
                    "completed_at": now,
                }
                for message_id, parent_id, message in zip(ids, [None, *ids], messages, strict=False)
            ],
        )
    await db.execute(
        update(models.Chat)
        .where(models.Chat.id == chat.id)
        .values(active_leaf_id=ids[-1] if ids else None, carried=asdict(carried))
    )
    return chat.id

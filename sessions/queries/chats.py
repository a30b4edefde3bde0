"""Chats and the trees of their messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Select, bindparam, exists, func, insert, literal, select, update
from sqlalchemy import delete as delete_from
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from sessions import models
from sessions.errors import NotFound
from sessions.queries.ids import new_id
from sessions.records import Chat, ChatSummary, Message

_MESSAGE_COLUMNS = (
    models.Message.id,
    models.Message.chat_id,
    models.Message.parent_id,
    models.Message.role,
    models.Message.text,
    models.Message.token_ids,
    models.Message.status,
    models.Message.finish_reason,
    models.Message.error,
    models.Message.created_at,
    models.Message.completed_at,
)


async def summaries(
    db: AsyncConnection, user_id: str, limit: int, before: datetime | None
) -> list[ChatSummary]:
    chat = models.Chat
    running = exists().where(models.Turn.chat_id == chat.id, models.Turn.running.is_not(None))
    query = (
        select(
            chat.id,
            chat.title,
            models.Assistant.name.label("assistant_name"),
            running.label("running"),
            chat.created_at,
            chat.updated_at,
        )
        .join(models.Prefix, models.Prefix.id == chat.prefix_id)
        .join(
            models.AssistantVersion,
            models.AssistantVersion.id == models.Prefix.assistant_version_id,
        )
        .join(models.Assistant, models.Assistant.id == models.AssistantVersion.assistant_id)
        .where(chat.user_id == user_id)
        .order_by(chat.updated_at.desc())
        .limit(limit)
    )
    if before is not None:
        query = query.where(chat.updated_at < before)
    return [ChatSummary(**row) for row in (await db.execute(query)).mappings()]


async def owned(db: AsyncConnection, user_id: str, chat_id: str) -> Chat | None:
    row = (
        (
            await db.execute(
                _chat_query().where(models.Chat.id == chat_id, models.Chat.user_id == user_id)
            )
        )
        .mappings()
        .one_or_none()
    )
    return None if row is None else Chat(**row)


async def chat_of_message(db: AsyncConnection, user_id: str, message_id: str) -> str | None:
    return await db.scalar(
        select(models.Message.chat_id)
        .join(models.Chat, models.Chat.id == models.Message.chat_id)
        .where(models.Message.id == message_id, models.Chat.user_id == user_id)
    )


async def create(
    db: AsyncConnection, user_id: str, prefix_id: str, title: str, now: datetime
) -> Chat:
    if await db.scalar(select(models.User.id).where(models.User.id == user_id)) is None:
        raise NotFound("user", user_id)
    if await db.scalar(select(models.Prefix.id).where(models.Prefix.id == prefix_id)) is None:
        raise NotFound("prefix", prefix_id)
    chat_id = new_id()
    await db.execute(
        insert(models.Chat).values(
            id=chat_id,
            user_id=user_id,
            prefix_id=prefix_id,
            title=title,
            created_at=now,
            updated_at=now,
        )
    )
    row = (await db.execute(_chat_query().where(models.Chat.id == chat_id))).mappings().one()
    return Chat(**row)


async def rename(db: AsyncConnection, user_id: str, chat_id: str, title: str) -> bool:
    done = await db.execute(
        update(models.Chat)
        .where(models.Chat.id == chat_id, models.Chat.user_id == user_id)
        .values(title=title)
    )
    return done.rowcount > 0


async def delete(db: AsyncConnection, user_id: str, chat_id: str) -> bool:
    """Deletes from the leaves of the schema up: cascades would recurse along a chat's length."""
    done = await db.execute(
        update(models.Chat)
        .where(models.Chat.id == chat_id, models.Chat.user_id == user_id)
        .values(active_leaf_id=None)
    )
    if done.rowcount == 0:
        return False
    turn_ids = select(models.Turn.id).where(models.Turn.chat_id == chat_id)
    await db.execute(
        delete_from(models.TurnLatency).where(models.TurnLatency.turn_id.in_(turn_ids))
    )
    await db.execute(delete_from(models.Turn).where(models.Turn.chat_id == chat_id))
    await db.execute(delete_from(models.Message).where(models.Message.chat_id == chat_id))
    await db.execute(delete_from(models.Chat).where(models.Chat.id == chat_id))
    await db.execute(insert(models.ChatToForget).values(chat_id=chat_id))
    return True


async def to_forget(db: AsyncConnection) -> list[str]:
    return list(await db.scalars(select(models.ChatToForget.chat_id)))


async def forgotten(db: AsyncConnection, chat_ids: Sequence[str]) -> None:
    if chat_ids:
        await db.execute(
            delete_from(models.ChatToForget).where(
                models.ChatToForget.chat_id == bindparam("forgotten_id")
            ),
            [{"forgotten_id": chat_id} for chat_id in chat_ids],
        )


async def path(db: AsyncConnection, chat_id: str, leaf_id: str | None) -> list[Message]:
    if leaf_id is None:
        chat = (
            await db.execute(select(models.Chat.active_leaf_id).where(models.Chat.id == chat_id))
        ).one_or_none()
        if chat is None:
            raise NotFound("chat", chat_id)
        leaf_id = chat.active_leaf_id
        if leaf_id is None:
            return []
    step = (
        select(models.Message.id, models.Message.parent_id, literal(0).label("height"))
        .where(models.Message.id == leaf_id, models.Message.chat_id == chat_id)
        .cte("step", recursive=True)
    )
    parent = aliased(models.Message)
    step = step.union_all(
        select(parent.id, parent.parent_id, step.c.height + 1).join(
            step, parent.id == step.c.parent_id
        )
    )
    rows = await db.execute(
        select(*_MESSAGE_COLUMNS)
        .join(step, models.Message.id == step.c.id)
        .order_by(step.c.height.desc())
    )
    messages = [Message(**row) for row in rows.mappings()]
    if not messages:
        raise NotFound("message", leaf_id)
    return messages


async def message(db: AsyncConnection, chat_id: str, message_id: str) -> Message | None:
    row = (
        (
            await db.execute(
                select(*_MESSAGE_COLUMNS).where(
                    models.Message.id == message_id, models.Message.chat_id == chat_id
                )
            )
        )
        .mappings()
        .one_or_none()
    )
    return None if row is None else Message(**row)


async def siblings(
    db: AsyncConnection, chat_id: str, message_ids: Sequence[str]
) -> dict[str, list[str]]:
    """Reads the tree without its text: a chat has few messages, and no statement per message."""
    rows = (
        await db.execute(
            select(models.Message.id, models.Message.parent_id)
            .where(models.Message.chat_id == chat_id)
            .order_by(models.Message.created_at, models.Message.id)
        )
    ).all()
    branches: dict[str | None, list[str]] = {}
    for row in rows:
        branches.setdefault(row.parent_id, []).append(row.id)
    parents: dict[str, str | None] = {row.id: row.parent_id for row in rows}
    return {key: branches[parents[key]] for key in message_ids if key in parents}


async def select_branch(db: AsyncConnection, chat_id: str, message_id: str) -> str:
    below = (
        select(models.Message.id, models.Message.created_at, literal(0).label("depth"))
        .where(models.Message.id == message_id, models.Message.chat_id == chat_id)
        .cte("below", recursive=True)
    )
    child = aliased(models.Message)
    below = below.union_all(
        select(child.id, child.created_at, below.c.depth + 1).join(
            below, child.parent_id == below.c.id
        )
    )
    # Children are never older than their parents, so the newest and deepest has none.
    leaf_id: str | None = await db.scalar(
        select(below.c.id).order_by(below.c.created_at.desc(), below.c.depth.desc()).limit(1)
    )
    if leaf_id is None:
        raise NotFound("message", message_id)
    await db.execute(
        update(models.Chat).where(models.Chat.id == chat_id).values(active_leaf_id=leaf_id)
    )
    return leaf_id


def _chat_query() -> Select[*tuple[object, ...]]:
    chat, version = models.Chat, models.AssistantVersion
    any_version = aliased(models.AssistantVersion)
    latest = (
        select(func.max(any_version.number))
        .where(any_version.assistant_id == version.assistant_id)
        .scalar_subquery()
    )
    return (
        select(
            chat.id,
            chat.user_id,
            chat.prefix_id,
            chat.title,
            chat.active_leaf_id,
            models.Assistant.id.label("assistant_id"),
            models.Assistant.name.label("assistant_name"),
            version.number.label("assistant_version"),
            latest.label("latest_version"),
            chat.created_at,
            chat.updated_at,
        )
        .join(models.Prefix, models.Prefix.id == chat.prefix_id)
        .join(version, version.id == models.Prefix.assistant_version_id)
        .join(models.Assistant, models.Assistant.id == version.assistant_id)
    )

"""Chats and the trees of their messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import (
    Boolean,
    RowMapping,
    Select,
    bindparam,
    exists,
    func,
    insert,
    literal,
    select,
    tuple_,
    update,
)
from sqlalchemy import delete as delete_from
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from sessions import models
from sessions.column_types import UtcDateTime
from sessions.errors import NotFound
from sessions.queries.ids import new_id
from sessions.records import Carried, Chat, ChatCursor, ChatSummary, DeletedChat, Message

LISTED = "browser"  # the origin of chats that browsers see
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
    models.Message.group_id,
    models.Message.candidate,
)


async def summaries(
    db: AsyncConnection, user_id: str, limit: int, after: ChatCursor | None
) -> list[ChatSummary]:
    chat = models.Chat
    running = exists().where(models.Turn.chat_id == chat.id, models.Turn.running.is_not(None))
    query = (
        select(
            chat.id,
            chat.title,
            models.Assistant.name.label("assistant_name"),
            running.label("running"),
            chat.pinned,
            chat.created_at,
            chat.updated_at,
        )
        .join(models.Prefix, models.Prefix.id == chat.prefix_id)
        .join(
            models.AssistantVersion,
            models.AssistantVersion.id == models.Prefix.assistant_version_id,
        )
        .join(models.Assistant, models.Assistant.id == models.AssistantVersion.assistant_id)
        .where(chat.user_id == user_id, chat.deleted_at.is_(None), chat.origin == LISTED)
        .order_by(chat.pinned.desc(), chat.updated_at.desc(), chat.id.desc())
        .limit(limit)
    )
    if after is not None:
        query = query.where(
            tuple_(chat.pinned, chat.updated_at, chat.id)
            < tuple_(
                literal(after.pinned, Boolean()),
                literal(after.updated_at, UtcDateTime()),
                literal(after.id),
            )
        )
    return [ChatSummary(**row) for row in (await db.execute(query)).mappings()]


async def owned(db: AsyncConnection, user_id: str, chat_id: str) -> Chat | None:
    row = (
        (
            await db.execute(
                _chat_query().where(
                    models.Chat.id == chat_id,
                    models.Chat.user_id == user_id,
                    models.Chat.deleted_at.is_(None),
                    models.Chat.origin == LISTED,
                )
            )
        )
        .mappings()
        .one_or_none()
    )
    return None if row is None else _chat(row)


async def by_id(db: AsyncConnection, chat_id: str) -> Chat | None:
    query = _chat_query().where(models.Chat.id == chat_id, models.Chat.deleted_at.is_(None))
    row = (await db.execute(query)).mappings().one_or_none()
    return None if row is None else _chat(row)


async def chat_of_message(db: AsyncConnection, user_id: str, message_id: str) -> str | None:
    return await db.scalar(
        select(models.Message.chat_id)
        .join(models.Chat, models.Chat.id == models.Message.chat_id)
        .where(
            models.Message.id == message_id,
            models.Chat.user_id == user_id,
            models.Chat.deleted_at.is_(None),
        )
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
    return _chat(row)


async def rename(db: AsyncConnection, user_id: str, chat_id: str, title: str) -> bool:
    return await _change(db, user_id, chat_id, title=title)


async def pin(db: AsyncConnection, user_id: str, chat_id: str, pinned: bool) -> bool:
    return await _change(db, user_id, chat_id, pinned=pinned)


async def delete(db: AsyncConnection, user_id: str, chat_id: str, now: datetime) -> bool:
    return await _change(db, user_id, chat_id, deleted_at=now)


async def restore(db: AsyncConnection, user_id: str, chat_id: str) -> bool:
    done = await db.execute(
        update(models.Chat)
        .where(
            models.Chat.id == chat_id,
            models.Chat.user_id == user_id,
            models.Chat.deleted_at.is_not(None),
        )
        .values(deleted_at=None)
    )
    return done.rowcount > 0


async def deleted(db: AsyncConnection, user_id: str) -> list[DeletedChat]:
    chat = models.Chat
    rows = await db.execute(
        select(chat.id, chat.title, chat.deleted_at)
        .where(chat.user_id == user_id, chat.deleted_at.is_not(None), chat.origin == LISTED)
        .order_by(chat.deleted_at.desc())
    )
    return [DeletedChat(**row) for row in rows.mappings()]


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


async def group(db: AsyncConnection, chat_id: str, group_id: str) -> list[Message]:
    rows = await db.execute(
        select(*_MESSAGE_COLUMNS)
        .where(models.Message.chat_id == chat_id, models.Message.group_id == group_id)
        .order_by(models.Message.candidate)
    )
    return [Message(**row) for row in rows.mappings()]


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


async def _change(db: AsyncConnection, user_id: str, chat_id: str, **values: object) -> bool:
    done = await db.execute(
        update(models.Chat)
        .where(
            models.Chat.id == chat_id,
            models.Chat.user_id == user_id,
            models.Chat.deleted_at.is_(None),
        )
        .values(**values)
    )
    return done.rowcount > 0


def _chat(row: RowMapping) -> Chat:
    carried = row["carried"]
    return Chat(**{**row, "carried": None if carried is None else Carried(**carried)})


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
            chat.pinned,
            models.Assistant.id.label("assistant_id"),
            models.Assistant.name.label("assistant_name"),
            version.number.label("assistant_version"),
            latest.label("latest_version"),
            chat.created_at,
            chat.updated_at,
            chat.carried,
        )
        .join(models.Prefix, models.Prefix.id == chat.prefix_id)
        .join(version, version.id == models.Prefix.assistant_version_id)
        .join(models.Assistant, models.Assistant.id == version.assistant_id)
    )

"""Chats by the tokens that they have begun with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sqlalchemy import delete, func, literal, select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from sessions import models
from sessions.answer_records import MarkedChat, TreeMessage
from sessions.path_digests import boundaries, digests

MAX_FOUND = 8  # of chats that begin alike


async def note(db: AsyncConnection, chat_id: str, message_id: str) -> None:
    """Mark the path that ends in this message; what is marked already costs its lengths only."""
    message, mark = models.Message, models.PathMark
    step = (
        select(message.id, message.parent_id, literal(0).label("height"))
        .where(message.id == message_id)
        .cte("step", recursive=True)
    )
    parent = aliased(message)
    step = step.union_all(
        select(parent.id, parent.parent_id, step.c.height + 1).join(
            step, parent.id == step.c.parent_id
        )
    )
    path = (
        select(message.id, (func.length(message.token_ids) / 4).label("tokens"))
        .join(step, message.id == step.c.id)
        .order_by(step.c.height.desc())
    )
    rows = (await db.execute(path)).all()
    ends = list(accumulate(row.tokens for row in rows))
    wanted: dict[str, list[int]] = {}  # by the message that the last token is of
    at = 0
    for boundary in boundaries(ends[-1] if ends else 0):
        while ends[at] < boundary:
            at += 1
        wanted.setdefault(rows[at].id, []).append(boundary)
    known = await db.execute(
        select(mark.message_id, func.count().label("marks"))
        .where(mark.message_id.in_(wanted))
        .group_by(mark.message_id)
    )
    have = {row.message_id: row.marks for row in known}
    if all(have.get(key) == len(value) for key, value in wanted.items()):
        return
    owner = (
        await db.execute(
            select(models.Chat.user_id, models.Prefix.token_ids)
            .join(models.Prefix, models.Prefix.id == models.Chat.prefix_id)
            .where(models.Chat.id == chat_id)
        )
    ).one()
    ids_of = select(message.token_ids).join(step, message.id == step.c.id)
    lists = await db.scalars(ids_of.order_by(step.c.height.desc()))
    ids = [token for some in lists for token in some]
    by_length = {
        end: digest for digest, end in digests(owner.user_id, owner.token_ids, ids).items()
    }
    await db.execute(
        upsert(mark).on_conflict_do_nothing(),
        [
            {"digest": by_length[end], "message_id": key, "chat_id": chat_id}
            for key, marks in wanted.items()
            for end in marks
        ],
    )


async def note_again(db: AsyncConnection, chat_id: str) -> None:
    """Make a chat's marks anew, once it is another user's: a digest holds whose it is."""
    message, mark = models.Message, models.PathMark
    found = await db.scalars(
        select(message.id)
        .where(message.id.in_(select(mark.message_id).where(mark.chat_id == chat_id)))
        .order_by(message.created_at.desc())  # a path's last message marks all of it
    )
    marked = list(found)
    await db.execute(delete(mark).where(mark.chat_id == chat_id))
    for message_id in marked:
        await note(db, chat_id, message_id)


async def chats_with(
    db: AsyncConnection, user_id: str, wanted: Sequence[bytes]
) -> list[MarkedChat]:
    mark = models.PathMark
    found = await db.scalars(select(mark.digest).where(mark.digest.in_(wanted)).distinct())
    there = set(found)
    for digest in wanted:
        if digest in there and (chats := await _chats_with(db, user_id, digest)):
            return chats
    return []


async def _chats_with(db: AsyncConnection, user_id: str, digest: bytes) -> list[MarkedChat]:
    chat, mark = models.Chat, models.PathMark
    rows = await db.execute(
        select(mark.chat_id, models.AssistantVersion.assistant_id, chat.origin)
        .distinct()
        .join(chat, chat.id == mark.chat_id)
        .join(models.Prefix, models.Prefix.id == chat.prefix_id)
        .join(
            models.AssistantVersion,
            models.AssistantVersion.id == models.Prefix.assistant_version_id,
        )
        .where(mark.digest == digest, chat.user_id == user_id, chat.deleted_at.is_(None))
        .order_by(chat.updated_at.desc())
        .limit(MAX_FOUND)
    )
    return [MarkedChat(**row) for row in rows.mappings()]


async def tree(db: AsyncConnection, chat_id: str) -> list[TreeMessage]:
    message = models.Message
    rows = await db.execute(
        select(
            message.id,
            message.parent_id,
            message.role,
            message.status,
            message.finish_reason,
            message.token_ids,
        ).where(message.chat_id == chat_id)
    )
    return [TreeMessage(**row) for row in rows.mappings()]

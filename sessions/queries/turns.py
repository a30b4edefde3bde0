"""Turns: a user's message and its answer, from the first commit to the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import CursorResult, bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import NotFound, StaleParent, TurnRunning
from sessions.queries import chats
from sessions.queries.ids import new_id
from sessions.records import EndStatus, Latency, Progress, Turn

_TURN_COLUMNS = (
    models.Turn.id,
    models.Turn.chat_id,
    models.Turn.user_message_id,
    models.Turn.message_id,
    models.Turn.running.is_not(None).label("running"),
    models.Turn.sampling,
    models.Turn.created_at,
    models.Turn.ended_at,
)


async def start_chat(
    db: AsyncConnection,
    user_id: str,
    prefix_id: str,
    title: str,
    user_text: str,
    user_token_ids: Sequence[int],
    sampling: Mapping[str, Any],
    now: datetime,
) -> Turn:
    chat = await chats.create(db, user_id, prefix_id, title, now)
    return await start(db, chat.id, None, user_text, user_token_ids, sampling, now)


async def start(
    db: AsyncConnection,
    chat_id: str,
    parent_id: str | None,
    user_text: str,
    user_token_ids: Sequence[int],
    sampling: Mapping[str, Any],
    now: datetime,
) -> Turn:
    if await db.scalar(select(models.Chat.id).where(models.Chat.id == chat_id)) is None:
        raise NotFound("chat", chat_id)
    if parent_id is not None:
        parent = await _role(db, chat_id, parent_id)
        if parent != "assistant":
            raise StaleParent(chat_id, parent_id)
    user_message_id = new_id()
    await db.execute(
        insert(models.Message).values(
            id=user_message_id,
            chat_id=chat_id,
            parent_id=parent_id,
            role="user",
            text=user_text,
            token_ids=user_token_ids,
            status="complete",
            created_at=now,
            completed_at=now,
        )
    )
    return await _answer(db, chat_id, user_message_id, sampling, now)


async def retry(
    db: AsyncConnection,
    chat_id: str,
    message_id: str,
    sampling: Mapping[str, Any],
    now: datetime,
) -> Turn:
    user_message_id = await db.scalar(
        select(models.Message.parent_id).where(
            models.Message.id == message_id,
            models.Message.chat_id == chat_id,
            models.Message.role == "assistant",
        )
    )
    if user_message_id is None:
        raise NotFound("answer", message_id)
    return await _answer(db, chat_id, user_message_id, sampling, now)


async def running(db: AsyncConnection, chat_id: str) -> Turn | None:
    return _one(
        await db.execute(
            select(*_TURN_COLUMNS).where(
                models.Turn.chat_id == chat_id, models.Turn.running.is_not(None)
            )
        )
    )


async def of_answer(db: AsyncConnection, chat_id: str, message_id: str) -> Turn | None:
    return _one(
        await db.execute(
            select(*_TURN_COLUMNS).where(
                models.Turn.chat_id == chat_id, models.Turn.message_id == message_id
            )
        )
    )


async def owned(db: AsyncConnection, user_id: str, turn_id: str) -> Turn | None:
    return _one(
        await db.execute(
            select(*_TURN_COLUMNS)
            .join(models.Chat, models.Chat.id == models.Turn.chat_id)
            .where(models.Turn.id == turn_id, models.Chat.user_id == user_id)
        )
    )


async def save_progress(db: AsyncConnection, progress: Sequence[Progress]) -> None:
    if not progress:
        return
    table = models.Message
    await db.execute(
        update(table)
        .where(table.id == bindparam("message_id"), table.status == "running")
        .values(text=bindparam("new_text"), token_ids=bindparam("new_ids")),
        [
            {"message_id": item.message_id, "new_text": item.text, "new_ids": item.token_ids}
            for item in progress
        ],
    )


async def finish(
    db: AsyncConnection,
    turn_id: str,
    status: EndStatus,
    finish_reason: str | None,
    error: str | None,
    text: str,
    token_ids: Sequence[int],
    latency: Latency | None,
    now: datetime,
) -> bool:
    turn = (
        await db.execute(
            update(models.Turn)
            .where(models.Turn.id == turn_id, models.Turn.running.is_not(None))
            .values(running=None, ended_at=now)
            .returning(models.Turn.chat_id, models.Turn.message_id)
        )
    ).one_or_none()
    if turn is None:
        return False
    await db.execute(
        update(models.Message)
        .where(models.Message.id == turn.message_id)
        .values(
            status=status,
            finish_reason=finish_reason,
            error=error,
            text=text,
            token_ids=token_ids,
            completed_at=now,
        )
    )
    await db.execute(
        update(models.Chat).where(models.Chat.id == turn.chat_id).values(updated_at=now)
    )
    if latency is not None:
        await db.execute(insert(models.TurnLatency).values(turn_id=turn_id, **asdict(latency)))
    return True


async def interrupt_running(db: AsyncConnection, now: datetime) -> list[Turn]:
    # SQLite 3.40 takes `running IS NOT NULL` in RETURNING for true, as the index it went by says.
    rows = await db.execute(
        update(models.Turn)
        .where(models.Turn.running.is_not(None))
        .values(running=None, ended_at=now)
        .returning(*_TURN_COLUMNS)
    )
    ended = [Turn(**{**row, "running": False}) for row in rows.mappings()]
    # By its own status, so that an answer without a running turn is mended as well.
    await db.execute(
        update(models.Message)
        .where(models.Message.status == "running")
        .values(status="interrupted", completed_at=now)
    )
    return ended


async def _answer(
    db: AsyncConnection,
    chat_id: str,
    user_message_id: str,
    sampling: Mapping[str, Any],
    now: datetime,
) -> Turn:
    """The empty answer under a user's message, its turn, and the chat's new active leaf."""
    message_id, turn_id = new_id(), new_id()
    await db.execute(
        insert(models.Message).values(
            id=message_id,
            chat_id=chat_id,
            parent_id=user_message_id,
            role="assistant",
            text="",
            token_ids=[],
            status="running",
            created_at=now,
        )
    )
    try:
        await db.execute(
            insert(models.Turn).values(
                id=turn_id,
                chat_id=chat_id,
                user_message_id=user_message_id,
                message_id=message_id,
                running=True,
                sampling=dict(sampling),
                created_at=now,
            )
        )
    except IntegrityError as error:
        # The rows it refers to were made or seen in this transaction: only the unique index is
        # left, and it holds against other processes too.
        raise TurnRunning(chat_id) from error
    await db.execute(
        update(models.Chat)
        .where(models.Chat.id == chat_id)
        .values(active_leaf_id=message_id, updated_at=now)
    )
    return Turn(
        id=turn_id,
        chat_id=chat_id,
        user_message_id=user_message_id,
        message_id=message_id,
        running=True,
        sampling=dict(sampling),
        created_at=now,
        ended_at=None,
    )


async def _role(db: AsyncConnection, chat_id: str, message_id: str) -> str | None:
    return await db.scalar(
        select(models.Message.role).where(
            models.Message.id == message_id, models.Message.chat_id == chat_id
        )
    )


def _one(rows: CursorResult[Any]) -> Turn | None:
    row = rows.mappings().one_or_none()
    return None if row is None else Turn(**row)

"""Turns as they begin, and as they are looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, cast

from sqlalchemy import CursorResult, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import NotFound, StaleParent, TurnRunning
from sessions.queries import chats, queued
from sessions.queries.ids import new_id
from sessions.records import Turn

TURN_COLUMNS = (
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
    candidates: int,
    now: datetime,
) -> list[Turn]:
    chat = await chats.create(db, user_id, prefix_id, title, now)
    return await start(db, chat.id, None, user_text, user_token_ids, sampling, candidates, now)


async def start(
    db: AsyncConnection,
    chat_id: str,
    parent_id: str | None,
    user_text: str,
    user_token_ids: Sequence[int],
    sampling: Mapping[str, Any],
    candidates: int,
    now: datetime,
) -> list[Turn]:
    known = select(models.Chat.id).where(
        models.Chat.id == chat_id, models.Chat.deleted_at.is_(None)
    )
    if await db.scalar(known) is None:
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
    return await add_answers(db, chat_id, user_message_id, sampling, candidates, now)


async def start_queued(
    db: AsyncConnection,
    chat_id: str,
    parent_id: str,
    user_text: str,
    user_token_ids: Sequence[int],
    sampling: Mapping[str, Any],
    now: datetime,
) -> Turn:
    if await queued.take(db, chat_id) != user_text:
        raise NotFound("queued message", chat_id)
    [turn] = await start(db, chat_id, parent_id, user_text, user_token_ids, sampling, 1, now)
    return turn


async def retry(
    db: AsyncConnection,
    chat_id: str,
    message_id: str,
    sampling: Mapping[str, Any],
    candidates: int,
    now: datetime,
) -> list[Turn]:
    user_message_id = await _question(db, chat_id, message_id)
    return await add_answers(db, chat_id, user_message_id, sampling, candidates, now)


async def go_on(
    db: AsyncConnection,
    chat_id: str,
    message_id: str,
    sampling: Mapping[str, Any],
    now: datetime,
) -> Turn:
    user_message_id = await _question(db, chat_id, message_id)
    turn = _new_turn(chat_id, user_message_id, message_id, sampling, now)
    await _lock(db, chat_id, turn.id)
    await db.execute(
        update(models.Message)
        .where(models.Message.id == message_id)
        .values(status="running", finish_reason=None, error=None, completed_at=None)
    )
    await _insert_turns(db, [turn], turn.id)
    await _set_leaf(db, chat_id, message_id, now)
    return turn


async def running(db: AsyncConnection, chat_id: str) -> list[Turn]:
    rows = await db.execute(
        select(*TURN_COLUMNS)
        .join(models.Message, models.Message.id == models.Turn.message_id)
        .where(models.Turn.chat_id == chat_id, models.Turn.running.is_not(None))
        .order_by(models.Message.candidate)
    )
    return [Turn(**row) for row in rows.mappings()]


async def latest(db: AsyncConnection) -> datetime | None:
    """When the last of all turns began; None before the first."""
    return cast(datetime | None, await db.scalar(select(func.max(models.Turn.created_at))))


async def of_answer(db: AsyncConnection, chat_id: str, message_id: str) -> Turn | None:
    return _one(
        await db.execute(
            select(*TURN_COLUMNS)
            .where(models.Turn.chat_id == chat_id, models.Turn.message_id == message_id)
            .order_by(models.Turn.created_at.desc())
            .limit(1)
        )
    )


async def owned(db: AsyncConnection, user_id: str, turn_id: str) -> Turn | None:
    return _one(
        await db.execute(
            select(*TURN_COLUMNS)
            .join(models.Chat, models.Chat.id == models.Turn.chat_id)
            .where(models.Turn.id == turn_id, models.Chat.user_id == user_id)
        )
    )


async def add_answers(
    db: AsyncConnection,
    chat_id: str,
    user_message_id: str,
    sampling: Mapping[str, Any],
    candidates: int,
    now: datetime,
) -> list[Turn]:
    """Empty answers under a user's message and their turns; the first is the chat's new leaf."""
    turns = [
        _new_turn(chat_id, user_message_id, new_id(), sampling, now) for _ in range(candidates)
    ]
    group_id = turns[0].id
    await _lock(db, chat_id, group_id)
    await db.execute(
        insert(models.Message),
        [
            {
                "id": turn.message_id,
                "chat_id": chat_id,
                "parent_id": user_message_id,
                "role": "assistant",
                "text": "",
                "token_ids": [],
                "status": "running",
                "group_id": group_id if candidates > 1 else None,
                "candidate": candidate,
                # Siblings are ordered by time.
                "created_at": now + timedelta(microseconds=candidate),
            }
            for candidate, turn in enumerate(turns)
        ],
    )
    await _insert_turns(db, turns, group_id)
    await _set_leaf(db, chat_id, turns[0].message_id, now)
    return turns


def _new_turn(
    chat_id: str, user_message_id: str, message_id: str, sampling: Mapping[str, Any], now: datetime
) -> Turn:
    return Turn(
        id=new_id(),
        chat_id=chat_id,
        user_message_id=user_message_id,
        message_id=message_id,
        running=True,
        sampling=dict(sampling),
        created_at=now,
        ended_at=None,
    )


async def _insert_turns(db: AsyncConnection, turns: Sequence[Turn], group_id: str) -> None:
    await db.execute(insert(models.Turn), [{**asdict(turn), "running": group_id} for turn in turns])


async def _lock(db: AsyncConnection, chat_id: str, group_id: str) -> None:
    """Take the chat for one group of turns. Raises TurnRunning when another one has it."""
    taken = await db.execute(
        update(models.Chat)
        .where(models.Chat.id == chat_id, models.Chat.running_group_id.is_(None))
        .values(running_group_id=group_id)
    )
    if taken.rowcount == 0:
        raise TurnRunning(chat_id)


async def _set_leaf(db: AsyncConnection, chat_id: str, message_id: str, now: datetime) -> None:
    await db.execute(
        update(models.Chat)
        .where(models.Chat.id == chat_id)
        .values(active_leaf_id=message_id, updated_at=now)
    )


async def _question(db: AsyncConnection, chat_id: str, message_id: str) -> str:
    """The user's message that an answer is to. Raises NotFound."""
    user_message_id: str | None = await db.scalar(
        select(models.Message.parent_id).where(
            models.Message.id == message_id,
            models.Message.chat_id == chat_id,
            models.Message.role == "assistant",
        )
    )
    if user_message_id is None:
        raise NotFound("answer", message_id)
    return user_message_id


async def _role(db: AsyncConnection, chat_id: str, message_id: str) -> str | None:
    return await db.scalar(
        select(models.Message.role).where(
            models.Message.id == message_id, models.Message.chat_id == chat_id
        )
    )


def _one(rows: CursorResult[Any]) -> Turn | None:
    row = rows.mappings().one_or_none()
    return None if row is None else Turn(**row)

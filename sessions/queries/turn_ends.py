"""What running turns have so far, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import ColumnElement, bindparam, exists, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.queries import latency_sums, path_marks
from sessions.queries.latency_sums import EndedTurn
from sessions.queries.turns import TURN_COLUMNS
from sessions.records import EndStatus, Latency, Progress, Turn


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
    first_token_ms: float | None,
    now: datetime,
) -> bool:
    if first_token_ms is None and latency is not None:
        first_token_ms = latency.server_ttft_ms
        if first_token_ms is None:
            first_token_ms = latency.ttft_ms
    turn = (
        await db.execute(
            update(models.Turn)
            .where(models.Turn.id == turn_id, models.Turn.running.is_not(None))
            .values(running=None, ended_at=now, outcome=status, first_token_ms=first_token_ms)
            .returning(models.Turn.chat_id, models.Turn.message_id, models.Turn.created_at)
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
    await _unlock(db, models.Chat.id == turn.chat_id)
    await path_marks.note(db, turn.chat_id, turn.message_id)
    if latency is not None:
        await db.execute(insert(models.TurnLatency).values(turn_id=turn_id, **asdict(latency)))
    ended = EndedTurn(
        created_at=turn.created_at, outcome=status, first_token_ms=first_token_ms, latency=latency
    )
    await latency_sums.add(db, [ended], now)
    return True


async def interrupt_running(db: AsyncConnection, now: datetime) -> list[Turn]:
    # SQLite 3.40 takes `running IS NOT NULL` in RETURNING for true, as the index it went by says.
    rows = await db.execute(
        update(models.Turn)
        .where(models.Turn.running.is_not(None))
        .values(running=None, ended_at=now, outcome="interrupted")
        .returning(*TURN_COLUMNS)
    )
    ended = [Turn(**{**row, "running": False}) for row in rows.mappings()]
    await _unlock(db, models.Chat.running_group_id.is_not(None))
    # By their turns, which end in the same transaction: by status all messages would be read.
    for turn in ended:
        await db.execute(
            update(models.Message)
            .where(models.Message.id == turn.message_id, models.Message.status == "running")
            .values(status="interrupted", completed_at=now)
        )
    cut_off = [
        EndedTurn(
            created_at=turn.created_at, outcome="interrupted", first_token_ms=None, latency=None
        )
        for turn in ended
    ]
    await latency_sums.add(db, cut_off, now)
    return ended


async def _unlock(db: AsyncConnection, which: ColumnElement[bool]) -> None:
    """Free those of these chats in which no turn runs any more."""
    still = exists().where(models.Turn.chat_id == models.Chat.id, models.Turn.running.is_not(None))
    await db.execute(update(models.Chat).where(which, ~still).values(running_group_id=None))

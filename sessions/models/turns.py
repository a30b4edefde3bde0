"""Runs of the model, and what was measured of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, identifier, reference


class Turn(Base):
    """One run of the model for an answer; one that was gone on with has several.

    `running` is null once it has ended, and before that the chat's `running_group_id`: the foreign
    key lets no two groups of a chat run at once.
    """

    __tablename__ = "turn"
    __table_args__ = (
        ForeignKeyConstraint(["chat_id", "running"], ["chat.id", "chat.running_group_id"]),
        Index(
            "ix_turn_running",
            "running",
            sqlite_where=text("running IS NOT NULL"),
            postgresql_where=text("running IS NOT NULL"),
        ),
    )
    id: Mapped[str] = identifier()
    chat_id: Mapped[str] = reference("chat.id")
    user_message_id: Mapped[str] = reference("message.id")
    message_id: Mapped[str] = reference("message.id")
    running: Mapped[str | None] = mapped_column(String(32))
    sampling: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]


class TurnLatency(Base):
    """One row for each turn that was measured; the columns are those of `records.Latency`."""

    __tablename__ = "turn_latency"
    turn_id: Mapped[str] = mapped_column(String(32), ForeignKey("turn.id"), primary_key=True)
    queue_ms: Mapped[float]
    restore_ms: Mapped[float]
    restore_io_ms: Mapped[float]
    restore_compute_ms: Mapped[float]
    restore_method: Mapped[str] = mapped_column(String(64))
    restore_bytes: Mapped[int]
    prefill_ms: Mapped[float]
    ttft_ms: Mapped[float | None]
    itl_p50_ms: Mapped[float | None]
    itl_p95_ms: Mapped[float | None]
    total_ms: Mapped[float]
    tokens_in: Mapped[int]
    tokens_out: Mapped[int]
    prefix_tokens: Mapped[int]
    resident_tokens: Mapped[int]
    restored_tokens: Mapped[int]
    recomputed_tokens: Mapped[int]
    new_tokens: Mapped[int]
    batch_size: Mapped[float]
    prefix_restored_tokens: Mapped[int]
    prefix_computed_tokens: Mapped[int]
    preemptions: Mapped[int]
    server_ttft_ms: Mapped[float | None]
    restore_plan: Mapped[str] = mapped_column(Text)
    restore_predicted_ms: Mapped[float | None]

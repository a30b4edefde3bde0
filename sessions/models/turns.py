"""Runs of the model, and what was measured of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    String,
    Text,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, identifier, reference


class Turn(Base):
    """One run of the model for an answer; one that was gone on with has several.

    `running` is null once it has ended, and before that the chat's `running_group_id`: the foreign
    key lets no two groups of a chat run at once. `outcome` says how it ended (null while it runs),
    `first_token_ms` how long its first token took; null when there was none.
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
        Index("ix_turn_chat_id_created_at", "chat_id", "created_at"),  # a page of a chat's turns
    )
    id: Mapped[str] = identifier()
    chat_id: Mapped[str] = reference("chat.id", index=False)
    user_message_id: Mapped[str] = reference("message.id")
    message_id: Mapped[str] = reference("message.id")
    running: Mapped[str | None] = mapped_column(String(32))
    sampling: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str | None] = mapped_column(String(16))
    first_token_ms: Mapped[float | None]


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
    restored_from_memory: Mapped[int] = mapped_column(server_default="0")
    restore_spans: Mapped[list[Any]] = mapped_column(JSON, server_default="[]")


class LatencySum(Base):
    """Sums over the turns that began in an interval of `level` seconds, by kind and method.

    Kept in the transaction that ends a turn, and not taken back when a chat is deleted: no chat can
    be told apart here. `start` is seconds since 1970 UTC.
    """

    __tablename__ = "latency_sum"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 - SQLAlchemy reads it
    level: Mapped[int] = mapped_column(primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    method: Mapped[str] = mapped_column(String(64), primary_key=True)
    turns: Mapped[int]
    first_tokens: Mapped[int]  # turns that had one
    stopped: Mapped[int]  # turns without one, by why
    failed: Mapped[int]
    interrupted: Mapped[int]
    silent: Mapped[int]  # complete, and without a token
    tokens_in: Mapped[int] = mapped_column(BigInteger)
    tokens_out: Mapped[int] = mapped_column(BigInteger)
    prefix_tokens: Mapped[int] = mapped_column(BigInteger)
    prefix_restored_tokens: Mapped[int] = mapped_column(BigInteger)
    prefix_computed_tokens: Mapped[int] = mapped_column(BigInteger)
    resident_tokens: Mapped[int] = mapped_column(BigInteger)
    restored_tokens: Mapped[int] = mapped_column(BigInteger)
    recomputed_tokens: Mapped[int] = mapped_column(BigInteger)
    new_tokens: Mapped[int] = mapped_column(BigInteger)
    prefill_ms: Mapped[float]
    restore_ms: Mapped[float]
    restore_io_ms: Mapped[float]
    restore_compute_ms: Mapped[float]
    restore_bytes: Mapped[int] = mapped_column(BigInteger)
    predicted_turns: Mapped[int]  # restores that were predicted
    predicted_ms: Mapped[float]
    predicted_took_ms: Mapped[float]  # what those took
    preemptions: Mapped[int]


class LatencyCount(Base):
    """Histograms of what `LatencySum` sums: `sessions.latency_histogram` says what a bucket is."""

    __tablename__ = "latency_count"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 - SQLAlchemy reads it
    level: Mapped[int] = mapped_column(primary_key=True)
    measure: Mapped[str] = mapped_column(String(16), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    bucket: Mapped[int] = mapped_column(primary_key=True)
    turns: Mapped[int]

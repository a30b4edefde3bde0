"""The tables. The schema itself is made by the migrations; a test holds the two together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, MetaData, String, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sessions.column_types import TokenIds, UtcDateTime


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(),
        Sequence[int]: TokenIds(),
    }


def _id() -> Mapped[str]:
    return mapped_column(String(32), primary_key=True)


def _reference(target: str, *, index: bool = True) -> Mapped[str]:
    return mapped_column(String(32), ForeignKey(target), index=index)


class User(Base):
    __tablename__ = "user"
    id: Mapped[str] = _id()
    created_at: Mapped[datetime]


class Login(Base):
    __tablename__ = "login"
    id: Mapped[str] = _id()
    user_id: Mapped[str] = _reference("user.id")
    token_hash: Mapped[str] = mapped_column(String(128), unique=True)
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class ApiKey(Base):
    __tablename__ = "api_key"
    id: Mapped[str] = _id()
    user_id: Mapped[str] = _reference("user.id")
    key_hash: Mapped[str] = mapped_column(String(128), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class Assistant(Base):
    """`slug` is set for built-in ones, `owner_id` for private ones; `position` orders the list."""

    __tablename__ = "assistant"
    id: Mapped[str] = _id()
    slug: Mapped[str | None] = mapped_column(String(100), unique=True)
    owner_id: Mapped[str | None] = mapped_column(String(32), ForeignKey("user.id"), index=True)
    name: Mapped[str] = mapped_column(String(200))
    description: Mapped[str] = mapped_column(Text)
    greeting: Mapped[str] = mapped_column(Text)
    sampling: Mapped[dict[str, Any]]
    published: Mapped[bool]
    position: Mapped[int]
    created_at: Mapped[datetime]


class AssistantVersion(Base):
    __tablename__ = "assistant_version"
    __table_args__ = (UniqueConstraint("assistant_id", "number"),)
    id: Mapped[str] = _id()
    assistant_id: Mapped[str] = _reference("assistant.id", index=False)
    number: Mapped[int]
    system_prompt: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]


class Prefix(Base):
    __tablename__ = "prefix"
    __table_args__ = (UniqueConstraint("assistant_version_id", "tokenizer_digest"),)
    id: Mapped[str] = _id()
    assistant_version_id: Mapped[str] = _reference("assistant_version.id", index=False)
    tokenizer_digest: Mapped[str] = mapped_column(String(128))
    token_ids: Mapped[Sequence[int]]
    created_at: Mapped[datetime]


class Chat(Base):
    __tablename__ = "chat"
    __table_args__ = (Index("ix_chat_user_id_updated_at", "user_id", "updated_at"),)
    id: Mapped[str] = _id()
    user_id: Mapped[str] = _reference("user.id", index=False)
    prefix_id: Mapped[str] = _reference("prefix.id")
    title: Mapped[str] = mapped_column(Text)
    # chat and message refer to each other: use_alter keeps the order of the tables defined.
    active_leaf_id: Mapped[str | None] = mapped_column(
        String(32), ForeignKey("message.id", use_alter=True), index=True
    )
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class Message(Base):
    """A tree for each chat: messages with the same parent are branches."""

    __tablename__ = "message"
    id: Mapped[str] = _id()
    chat_id: Mapped[str] = _reference("chat.id")
    parent_id: Mapped[str | None] = mapped_column(String(32), ForeignKey("message.id"), index=True)
    role: Mapped[str] = mapped_column(String(16))
    text: Mapped[str] = mapped_column(Text)
    token_ids: Mapped[Sequence[int]]
    status: Mapped[str] = mapped_column(String(16))
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime]
    completed_at: Mapped[datetime | None]


class Turn(Base):
    """`running` is true or null: at most one row of a chat has it true."""

    __tablename__ = "turn"
    __table_args__ = (
        Index(
            "uq_turn_running",
            "chat_id",
            unique=True,
            sqlite_where=text("running IS NOT NULL"),
            postgresql_where=text("running IS NOT NULL"),
        ),
    )
    id: Mapped[str] = _id()
    chat_id: Mapped[str] = _reference("chat.id")
    user_message_id: Mapped[str] = _reference("message.id")
    message_id: Mapped[str] = mapped_column(String(32), ForeignKey("message.id"), unique=True)
    running: Mapped[bool | None]
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


class ChatToForget(Base):
    """A deleted chat whose checkpoints the engine has not confirmed to have deleted."""

    __tablename__ = "chat_to_forget"
    chat_id: Mapped[str] = mapped_column(String(32), primary_key=True)


class Setting(Base):
    __tablename__ = "setting"
    key: Mapped[str] = mapped_column(String(100), primary_key=True)
    value: Mapped[str] = mapped_column(Text)

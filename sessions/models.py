"""The tables. The schema itself is made by the migrations; a test holds the two together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
)
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
    hint: Mapped[str] = mapped_column(String(16), server_default="")  # how the key ends
    max_requests: Mapped[int | None]  # at once; null: as many as its user may have


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
    """`deleted_at` is set while a deletion can still be undone; then the row goes.

    `import_key` names what an imported chat was made from, `carried` what a chat took along from
    the one it goes on from. `running_group_id` names the turns that run; null while none does.
    """

    __tablename__ = "chat"
    __table_args__ = (
        # The order of a user's list.
        Index(
            "ix_chat_listed",
            "user_id",
            "pinned",
            "updated_at",
            "id",
            sqlite_where=text("deleted_at IS NULL"),
            postgresql_where=text("deleted_at IS NULL"),
        ),
        Index(
            "ix_chat_deleted_at",
            "deleted_at",
            sqlite_where=text("deleted_at IS NOT NULL"),
            postgresql_where=text("deleted_at IS NOT NULL"),
        ),
        Index(
            "uq_chat_import_key",
            "user_id",
            "import_key",
            unique=True,
            sqlite_where=text("import_key IS NOT NULL"),
            postgresql_where=text("import_key IS NOT NULL"),
        ),
        Index("uq_chat_id_running_group_id", "id", "running_group_id", unique=True),
    )
    id: Mapped[str] = _id()
    user_id: Mapped[str] = _reference("user.id", index=False)
    prefix_id: Mapped[str] = _reference("prefix.id")
    title: Mapped[str] = mapped_column(Text)
    # chat and message refer to each other: use_alter keeps the order of the tables defined.
    active_leaf_id: Mapped[str | None] = mapped_column(
        String(32), ForeignKey("message.id", use_alter=True), index=True
    )
    running_group_id: Mapped[str | None] = mapped_column(String(32))
    carried: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    pinned: Mapped[bool] = mapped_column(server_default=false())
    deleted_at: Mapped[datetime | None]
    import_key: Mapped[str | None] = mapped_column(String(64))
    # Made by whom: "browser", or "api", which browsers do not list.
    origin: Mapped[str] = mapped_column(String(16), server_default="browser")


class Message(Base):
    """A tree for each chat: messages with the same parent are branches.

    Answers that were asked for together share `group_id` and are told apart by `candidate`.
    """

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
    group_id: Mapped[str | None] = mapped_column(String(32))
    candidate: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime]
    completed_at: Mapped[datetime | None]


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
    id: Mapped[str] = _id()
    chat_id: Mapped[str] = _reference("chat.id")
    user_message_id: Mapped[str] = _reference("message.id")
    message_id: Mapped[str] = _reference("message.id")
    running: Mapped[str | None] = mapped_column(String(32))
    sampling: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]


class QueuedMessage(Base):
    """What a user wrote while an answer ran; `problem` says why it waits for them again."""

    __tablename__ = "queued_message"
    chat_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("chat.id", ondelete="CASCADE"), primary_key=True
    )
    text: Mapped[str] = mapped_column(Text)
    problem: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime]


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


class ChatToForget(Base):
    """A deleted chat whose checkpoints the engine has not confirmed to have deleted."""

    __tablename__ = "chat_to_forget"
    chat_id: Mapped[str] = mapped_column(String(32), primary_key=True)


class SearchEntry(Base):
    """A text in the search indices, under their row id: a message's, or a chat's title.

    Kept by triggers, as the indices are; both are made by the migration.
    """

    __tablename__ = "search_entry"
    id: Mapped[int] = mapped_column(primary_key=True)
    chat_id: Mapped[str] = mapped_column(String(32), index=True)
    message_id: Mapped[str | None] = mapped_column(String(32), unique=True)


class ApiConversation(Base):
    """A conversation of the API: its chat, and the items that no answer has followed yet.

    `version` counts its changes, so that of two made at once the second is noticed.
    """

    __tablename__ = "api_conversation"
    id: Mapped[str] = _id()
    user_id: Mapped[str] = _reference("user.id")
    chat_id: Mapped[str | None] = mapped_column(
        String(32), ForeignKey("chat.id", ondelete="SET NULL"), index=True
    )
    leaf_id: Mapped[str | None] = mapped_column(String(32))  # its last answer in that chat
    items: Mapped[list[dict[str, Any]]] = mapped_column(JSON())
    labels: Mapped[dict[str, Any]]
    version: Mapped[int]
    created_at: Mapped[datetime]


class ApiResponse(Base):
    """A stored response: an answer of a chat, and what the request for it said besides."""

    __tablename__ = "api_response"
    id: Mapped[str] = _id()
    user_id: Mapped[str] = _reference("user.id")
    chat_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("chat.id", ondelete="CASCADE"), index=True
    )
    message_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("message.id", ondelete="CASCADE"), index=True
    )
    num_inputs: Mapped[int]  # messages just before the answer that came with the request
    body: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class ApiState(Base):
    """The token ids of a stateless call, which the next one may go on from; kept for an hour."""

    __tablename__ = "api_state"
    id: Mapped[str] = _id()
    user_id: Mapped[str] = _reference("user.id")
    chat_id: Mapped[str] = mapped_column(String(32), index=True)  # of the engine; no chat has it
    prefix_ids: Mapped[Sequence[int]]
    token_ids: Mapped[Sequence[int]]
    prompt_tokens: Mapped[int]
    computed: Mapped[int]
    used_at: Mapped[float]


class Setting(Base):
    __tablename__ = "setting"
    key: Mapped[str] = mapped_column(String(100), primary_key=True)
    value: Mapped[str] = mapped_column(Text)

"""Chats, their messages, what waits in them, and what the search finds of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String, Text, false, text
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, identifier, reference


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
    id: Mapped[str] = identifier()
    user_id: Mapped[str] = reference("user.id", index=False)
    prefix_id: Mapped[str] = reference("prefix.id")
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
    id: Mapped[str] = identifier()
    chat_id: Mapped[str] = reference("chat.id")
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


class QueuedMessage(Base):
    """What a user wrote while an answer ran; `problem` says why it waits for them again."""

    __tablename__ = "queued_message"
    chat_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("chat.id", ondelete="CASCADE"), primary_key=True
    )
    text: Mapped[str] = mapped_column(Text)
    problem: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime]


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

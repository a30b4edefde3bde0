"""Assistants, the versions of their system prompts, and those prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, identifier, reference


class Assistant(Base):
    """`slug` is set for built-in ones, `owner_id` for people's; `position` orders the list.

    `revision` counts all changes, so that of two made at once the second is noticed. A deleted one
    is kept for the chats that were begun with it.
    """

    __tablename__ = "assistant"
    id: Mapped[str] = identifier()
    slug: Mapped[str | None] = mapped_column(String(100), unique=True)
    owner_id: Mapped[str | None] = mapped_column(String(32), ForeignKey("user.id"), index=True)
    name: Mapped[str] = mapped_column(String(200))
    description: Mapped[str] = mapped_column(Text)
    greeting: Mapped[str] = mapped_column(Text)
    sampling: Mapped[dict[str, Any]]
    published: Mapped[bool]
    position: Mapped[int]
    created_at: Mapped[datetime]
    revision: Mapped[int] = mapped_column(server_default="1")
    deleted_at: Mapped[datetime | None]


class AssistantVersion(Base):
    __tablename__ = "assistant_version"
    __table_args__ = (UniqueConstraint("assistant_id", "number"),)
    id: Mapped[str] = identifier()
    assistant_id: Mapped[str] = reference("assistant.id", index=False)
    number: Mapped[int]
    system_prompt: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]


class AssistantDocument(Base):
    """A text that a version's prompt has after its system prompt, in the order of `position`."""

    __tablename__ = "assistant_document"
    id: Mapped[str] = identifier()
    assistant_version_id: Mapped[str] = reference("assistant_version.id")
    position: Mapped[int]
    name: Mapped[str] = mapped_column(String(200))
    text: Mapped[str] = mapped_column(Text)


class ChatStorage(Base):
    """What a chat's messages take: texts and token ids, in bytes. Kept by triggers."""

    __tablename__ = "chat_storage"
    chat_id: Mapped[str] = mapped_column(
        String(32), ForeignKey("chat.id", ondelete="CASCADE"), primary_key=True
    )
    messages: Mapped[int]
    bytes: Mapped[int]


class Prefix(Base):
    __tablename__ = "prefix"
    __table_args__ = (UniqueConstraint("assistant_version_id", "tokenizer_digest"),)
    id: Mapped[str] = identifier()
    assistant_version_id: Mapped[str] = reference("assistant_version.id", index=False)
    tokenizer_digest: Mapped[str] = mapped_column(String(128))
    token_ids: Mapped[Sequence[int]]
    created_at: Mapped[datetime]

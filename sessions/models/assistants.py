"""Assistants, the versions of their system prompts, and those prompts as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, identifier, reference


class Assistant(Base):
    """`slug` is set for built-in ones, `owner_id` for private ones; `position` orders the list."""

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


class AssistantVersion(Base):
    __tablename__ = "assistant_version"
    __table_args__ = (UniqueConstraint("assistant_id", "number"),)
    id: Mapped[str] = identifier()
    assistant_id: Mapped[str] = reference("assistant.id", index=False)
    number: Mapped[int]
    system_prompt: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]


class Prefix(Base):
    __tablename__ = "prefix"
    __table_args__ = (UniqueConstraint("assistant_version_id", "tokenizer_digest"),)
    id: Mapped[str] = identifier()
    assistant_version_id: Mapped[str] = reference("assistant_version.id", index=False)
    tokenizer_digest: Mapped[str] = mapped_column(String(128))
    token_ids: Mapped[Sequence[int]]
    created_at: Mapped[datetime]

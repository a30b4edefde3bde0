"""What the API keeps besides chats."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, identifier, reference


class ApiConversation(Base):
    """A conversation of the API: its chat, and the items that no answer has followed yet.

    `version` counts its changes, so that of two made at once the second is noticed.
    """

    __tablename__ = "api_conversation"
    id: Mapped[str] = identifier()
    user_id: Mapped[str] = reference("user.id")
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
    id: Mapped[str] = identifier()
    user_id: Mapped[str] = reference("user.id")
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
    id: Mapped[str] = identifier()
    user_id: Mapped[str] = reference("user.id")
    chat_id: Mapped[str] = mapped_column(String(32), index=True)  # of the engine; no chat has it
    prefix_ids: Mapped[Sequence[int]]
    token_ids: Mapped[Sequence[int]]
    prompt_tokens: Mapped[int]
    computed: Mapped[int]
    used_at: Mapped[float]

"""What is derived of messages, as the application reads and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The HTML of an answer, and what it was made by and of."""

    message_id: str
    key: str
    html: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedChat:
    """A chat that has begun with certain tokens."""

    chat_id: str
    assistant_id: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMessage:
    """A message of a chat's tree without its text."""

    id: str
    parent_id: str | None
    role: str
    status: str
    finish_reason: str | None
    token_ids: Sequence[int]

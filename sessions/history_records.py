"""Records of search, export and import; frozen and plain as all that the repository hands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sessions.records import MessageStatus, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """A message that holds all terms of a search, or a chat whose title does.

    `message_id` and what follows it are None for a title. `place` orders the hits, latest first.
    """

    place: int
    chat_id: str
    chat_title: str
    chat_updated_at: datetime
    message_id: str | None = None
    role: Role | None = None
    text: str | None = None
    created_at: datetime | None = None
    active: bool = True  # on the branch that the chat shows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedMessage:
    """A message as it leaves the server: everything but its token ids."""

    id: str
    parent_id: str | None
    role: Role
    text: str
    status: MessageStatus
    finish_reason: str | None
    error: str | None
    created_at: datetime
    completed_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedChat:
    """A whole chat with all its branches, messages oldest first."""

    id: str
    title: str
    pinned: bool
    created_at: datetime
    updated_at: datetime
    assistant_name: str
    assistant_version: int
    active_leaf_id: str | None
    messages: list[ExportedMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessage:
    """A message to be imported; `parent` is the index of one that comes before it."""

    parent: int | None
    role: Role
    text: str
    token_ids: Sequence[int]
    status: MessageStatus
    finish_reason: str | None
    error: str | None
    created_at: datetime
    completed_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChat:
    """A chat to be imported.

    `key` is the same whenever the same chat is imported; `origin_id` is its id where it was
    exported by this program. `active_leaf` is an index of `messages`.
    """

    key: str
    origin_id: str | None
    title: str
    pinned: bool
    created_at: datetime
    updated_at: datetime
    messages: Sequence[NewMessage]
    active_leaf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of a chat to be imported: made, there already, or its deletion undone."""

    chat_id: str
    how: Literal["new", "known", "restored"]

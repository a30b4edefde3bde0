"""What the repository hands out and takes of assistants and of who uses how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sessions.records import AssistantVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDocument:
    """A text shared by all chats of an assistant's version."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDraft:
    """All that a person writes of an assistant; prompt and documents together make a version."""

    name: str
    description: str
    greeting: str
    system_prompt: str
    documents: Sequence[AssistantDocument] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDetail:
    """An assistant with its current version; `revision` counts all of its changes."""

    id: str
    slug: str | None  # of a built-in one
    owner_id: str | None
    name: str
    description: str
    greeting: str
    published: bool
    sampling: Mapping[str, Any]
    revision: int
    created_at: datetime
    version: AssistantVersion
    documents: list[AssistantDocument]

    @property
    def draft(self) -> AssistantDraft:
        return AssistantDraft(
            name=self.name,
            description=self.description,
            greeting=self.greeting,
            system_prompt=self.version.system_prompt,
            documents=self.documents,
            sampling=self.sampling,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionUse:
    """How many chats a version of an assistant has, of all users."""

    number: int
    chats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of the whole server; deleted chats that can still come back are counted."""

    users: int
    chats: int
    messages: int
    message_bytes: int  # texts and token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class UserUse:
    user_id: str
    name: str | None  # None: a guest
    created_at: datetime
    last_seen_at: datetime | None
    chats: int
    message_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatUse:
    """A chat as far as an operator sees it: never its title or text."""

    chat_id: str
    user_id: str
    assistant_name: str
    assistant_published: bool
    updated_at: datetime
    messages: int
    message_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantUse:
    """An assistant as far as an operator sees it: of a private one not its name."""

    assistant_id: str
    name: str
    owner_id: str | None
    published: bool
    deleted: bool
    versions: int
    chats: int
    message_bytes: int
    prompt_bytes: int  # system prompts and documents of all versions, about

"""Conversations: the requests, and the objects that clients read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.api.items import MAX_ITEMS, InputItem, item_json, message_json
from app.api.options import Metadata
from sessions.records import ApiConversation, ApiItem, Message

Items = Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)]


class ConversationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new conversation, with items that it begins with."""

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    metadata: Metadata


class NewItems(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a deleted object."""

    id: str
    object: str
    deleted: bool = True


def conversation_of(found: ApiConversation) -> Conversation:
    return Conversation(
        id=f"conv_{found.id}",
        created_at=int(found.created_at.timestamp()),
        metadata=found.labels,
    )


def any_item_json(item: Message | ApiItem) -> dict[str, Any]:
    return message_json(item) if isinstance(item, Message) else item_json(item)

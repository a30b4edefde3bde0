"""The items of a kept conversation: listed, added, taken out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.api.errors import not_found
from app.api.items import changed_meanwhile, item_of
from sessions.queries.ids import new_id
from sessions.records import ApiConversation, ApiItem, Message
from sessions.repository import Repository


class StoredItems:
    """Changes conversations without an answer. Stateless. Event loop only."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def all(self, found: ApiConversation) -> list[Message | ApiItem]:
        """All items, those that no answer has followed last."""
        path: Sequence[Message] = ()
        if found.chat_id is not None and found.leaf_id is not None:
            path = await self._repository.path(found.chat_id, found.leaf_id)
        return [*path, *found.items]

    async def add(self, found: ApiConversation, items: Sequence[ApiItem]) -> None:
        """Raises ApiError when another request was faster."""
        if not await self._repository.change_conversation(found, items=[*found.items, *items]):
            raise changed_meanwhile()

    async def remove(self, found: ApiConversation, item_id: str) -> None:
        """Take an item out; what follows it begins another chat. Raises ApiError, TurnRunning."""
        everything = await self.all(found)
        if item_id not in (one.id for one in everything):
            raise not_found("item", f"msg_{item_id}", "item_id")
        left = [one for one in found.items if one.id != item_id]
        if len(left) < len(found.items):
            changed = await self._repository.change_conversation(found, items=left)
        else:
            kept = [one for one in everything if one.id != item_id]
            items = [
                replace(item_of(one), id=new_id()) if isinstance(one, Message) else one
                for one in kept
            ]
            changed = await self._repository.leave_chat(found, items)
        if not changed:
            raise changed_meanwhile()

"""What a response goes on from, as the server keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.api.errors import not_found
from app.api.items import key_of
from app.api.keys import Caller
from sessions.errors import TurnRunning
from sessions.records import ApiConversation, ApiItem, ApiResponse, Message
from sessions.repository import Repository


@dataclass(frozen=True, kw_only=True)
class Base:
    """A chat up to an answer, and items that no answer has followed."""

    path: Sequence[Message] = ()
    chat_id: str | None = None
    conversation: ApiConversation | None = None

    @property
    def waiting(self) -> list[ApiItem]:
        return [] if self.conversation is None else self.conversation.items


class Bases:
    """Looks up what clients name. Stateless. Event loop only."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def response(self, caller: Caller, name: str, param: str) -> ApiResponse:
        """Raises ApiError."""
        key = key_of(name, "resp_", "response", param)
        found = await self._repository.api_response(caller.user_id, key)
        if found is None:
            raise not_found("response", name, param)
        return found

    async def conversation(self, caller: Caller, name: str, param: str) -> ApiConversation:
        """Raises ApiError."""
        key = key_of(name, "conv_", "conversation", param)
        found = await self._repository.conversation(caller.user_id, key)
        if found is None:
            raise not_found("conversation", name, param)
        return found

    async def after_response(self, caller: Caller, name: str) -> Base:
        """Raises ApiError, TurnRunning."""
        response = await self.response(caller, name, "previous_response_id")
        path = await self._ended(response.chat_id, response.message_id)
        return Base(path=path, chat_id=response.chat_id)

    async def after_conversation(self, found: ApiConversation) -> Base:
        """Raises TurnRunning."""
        if found.chat_id is None or found.leaf_id is None:
            return Base(conversation=found)
        path = await self._ended(found.chat_id, found.leaf_id)
        return Base(path=path, chat_id=found.chat_id, conversation=found)

    async def inputs(self, response: ApiResponse) -> list[Message]:
        """The messages that came with a response's request."""
        path = await self._repository.path(response.chat_id, response.message_id)
        return path[-1 - response.num_inputs : -1]

    async def _ended(self, chat_id: str, message_id: str) -> list[Message]:
        path = await self._repository.path(chat_id, message_id)
        if path[-1].status == "running":
            raise TurnRunning(chat_id)
        return path

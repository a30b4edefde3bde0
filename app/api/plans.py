"""Turns of kept chats: what is added to a chat, and what the engine runs of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.api.bases import Base
from app.api.errors import ApiError, invalid
from app.api.items import item_of, prompt_message
from app.api.keys import Caller
from app.api.service import Api
from app.turn_records import history_of
from engine.model.prompt import PromptIds, PromptMessage
from sessions.queries.api_responses import version_id
from sessions.queries.ids import new_id
from sessions.records import ApiItem, Prefix

_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A turn to be started: rows to be added, and what the engine runs."""

    prefix: Prefix
    chat_id: str | None  # None: a new one
    parent_id: str | None
    items: list[ApiItem]
    history_ids: list[int]
    history_computed: int
    new_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prefix.token_ids) + len(self.history_ids) + len(self.new_ids)


class Plans:
    """Makes them. Stateless but for what it was given. Event loop only."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._repository = api.repository

    async def new_chat(
        self, caller: Caller, instructions: str, base: Base, items: Sequence[ApiItem]
    ) -> Plan:
        """A chat that begins with all that was said. Raises ApiError."""
        added = [*base.waiting, *items]
        said = [*map(item_of, base.path), *added]
        key, system_text = _head(instructions, said[0])
        prompt = await self.whole(instructions, said)
        limit = self._api.context_limit // 2
        if len(prompt.prefix) > limit:
            raise ApiError(
                f"The system prompt has {len(prompt.prefix)} tokens; "
                f"at most half of the context ({limit}) can be one.",
                param="instructions" if instructions else "input",
                code="context_length_exceeded",
            )
        prefix = await self._repository.api_prefix(
            caller.user_id, key, system_text, self._api.tokenizer.digest, prompt.prefix
        )
        copies = [replace(item, id=new_id()) for item in map(item_of, base.path)]
        return Plan(
            prefix=prefix,
            chat_id=None,
            parent_id=None,
            items=_with_ids([*copies, *added], prompt.rest),
            history_ids=[],
            history_computed=0,
            new_ids=prompt.rest,
        )

    async def appended(
        self, caller: Caller, instructions: str, base: Base, items: Sequence[ApiItem]
    ) -> Plan | None:
        """Go on in the base's chat; None where that does not begin as this is to begin.

        A chat's ids are those that the model saw: they are only added to. Raises ApiError.
        """
        if base.chat_id is None:
            return None
        prefix = await self._repository.prefix_of_chat(base.chat_id)
        key, _ = _head(instructions, item_of(base.path[0]))
        same = version_id(caller.user_id, key), self._api.tokenizer.digest
        if (prefix.assistant_version_id, prefix.tokenizer_digest) != same:
            return None
        added = [*base.waiting, *items]
        history_ids, computed = history_of(base.path)
        messages = [prompt_message(item) for item in added]
        try:
            new_ids = await asyncio.to_thread(self._api.prompts.follow, messages)
        except ValueError as error:
            raise invalid("input", f"'input' cannot be written for this model: {error}.") from error
        return Plan(
            prefix=prefix,
            chat_id=base.chat_id,
            parent_id=base.path[-1].id,
            items=_with_ids(added, new_ids),
            history_ids=history_ids,
            history_computed=computed,
            new_ids=new_ids,
        )

    async def whole(self, instructions: str, said: Sequence[ApiItem]) -> PromptIds:
        """The ids of all that was said. Raises ApiError."""
        head = [PromptMessage("system", instructions)] if instructions else []
        return await self._api.build([*head, *map(prompt_message, said)], "input")


def _head(instructions: str, first: ApiItem) -> tuple[str, str]:
    """What names the chat's prefix among the user's, and its system prompt."""
    if instructions:
        return f"instructions {instructions}", instructions
    if first.role in _SYSTEM_ROLES:
        return f"item {first.text}", first.text
    return "none", ""


def _with_ids(items: Sequence[ApiItem], ids: list[int]) -> list[ApiItem]:
    """All tokens belong to the last of the messages that were added together."""
    return [*items[:-1], replace(items[-1], token_ids=ids)]

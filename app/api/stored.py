"""Responses and conversations that the server keeps: chats, gone on with by what is new."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from app.api.errors import ApiError, invalid, not_found
from app.api.generation import Generation
from app.api.items import item_of, items_of, key_of, prompt_message
from app.api.keys import Caller
from app.api.messages import check_text
from app.api.responses import ConversationRef, ResponseJob, response_json
from app.api.service import Api
from app.message_text import title_of
from app.turn_records import Outcome, history_of, outcome_of
from engine.messages import Submit, Warm
from engine.model.prompt import PromptMessage
from sessions.errors import TurnRunning
from sessions.queries.api_responses import version_id
from sessions.queries.ids import new_id
from sessions.records import ApiConversation, ApiItem, ApiResponse, Message, Prefix, Turn

_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a response goes on from: a chat up to an answer, items that no answer has followed."""

    path: Sequence[Message] = ()
    chat_id: str | None = None
    conversation: ApiConversation | None = None

    @property
    def waiting(self) -> list[ApiItem]:
        return [] if self.conversation is None else self.conversation.items


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


class StoredChats:
    """Starts turns of kept chats. Stateless but for what it was given. Event loop only."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._repository = api.repository

    # What a response goes on from

    async def base_of(self, caller: Caller, job: ResponseJob) -> Base:
        """Raises ApiError, TurnRunning."""
        request = job.request
        if request.conversation is not None:
            if request.previous_response_id is not None:
                raise invalid(
                    "previous_response_id",
                    "Give 'previous_response_id' or 'conversation', not both.",
                )
            if request.store is False:
                raise invalid("store", "What is said in a conversation is stored.")
            given = request.conversation
            name = given.id if isinstance(given, ConversationRef) else given
            found = await self.conversation(caller, name, "conversation")
            job.base["conversation"] = {"id": f"conv_{found.id}"}
            return await self.conversation_base(found)
        if request.previous_response_id is not None:
            return await self.response_base(caller, request.previous_response_id)
        return Base()

    async def response_base(self, caller: Caller, name: str) -> Base:
        """Raises ApiError, TurnRunning."""
        response = await self.response(caller, name, "previous_response_id")
        path = await self._repository.path(response.chat_id, response.message_id)
        if path[-1].status == "running":
            raise TurnRunning(response.chat_id)
        return Base(path=path, chat_id=response.chat_id)

    async def conversation_base(self, found: ApiConversation) -> Base:
        """Raises TurnRunning."""
        if found.chat_id is None or found.leaf_id is None:
            return Base(conversation=found)
        path = await self._repository.path(found.chat_id, found.leaf_id)
        if path[-1].status == "running":
            raise TurnRunning(found.chat_id)
        return Base(path=path, chat_id=found.chat_id, conversation=found)

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

    # Answers

    async def start(self, caller: Caller, job: ResponseJob) -> tuple[Generation, str]:
        """Begin the answer; with it the id of its item.

        Raises ApiError, TurnRunning, EngineUnavailable.
        """
        request, max_chars = job.request, self._api.settings.max_message_chars
        if request.instructions:
            check_text(request.instructions, "instructions", max_chars)
        items = items_of(request.input, "input", max_chars)
        base = await self.base_of(caller, job)
        if request.store is False:
            said = [*map(item_of, base.path), *items]
            return await self._start_unstored(caller, job, said), new_id()
        plan = await self._plan(caller, request.instructions or "", base, items)
        sampling = self._api.fit(plan.num_tokens, job.options.sampling, "input")
        ticket = self._api.enter(caller, 1)
        try:
            num_inputs = len(base.waiting) + len(items)
            turn = await self._repository.start_response(
                user_id=caller.user_id,
                response_id=job.response_id,
                prefix_id=plan.prefix.id,
                chat_id=plan.chat_id,
                parent_id=plan.parent_id,
                title=title_of(items[-1].text),
                items=plan.items,
                num_inputs=num_inputs,
                sampling=msgspec.to_builtins(sampling),
                body=job.in_progress(),
                conversation=base.conversation,
            )
        except BaseException:
            ticket.leave()
            raise
        submit = Submit(
            request_id=turn.id,
            chat_id=turn.chat_id,
            prefix_ids=plan.prefix.token_ids,
            history_ids=plan.history_ids,
            history_computed=plan.history_computed,
            new_ids=plan.new_ids,
            sampling=sampling,
            prefix_scope=self._api.scope(caller),
            top_logprobs=job.options.top_logprobs,
            grammar=job.options.grammar,
        )

        async def ended(generation: Generation) -> None:
            await self._store_end(job, turn, generation)

        generation = self._api.generations.start(ticket, [submit], ended=ended, error_param="input")
        return generation, turn.message_id

    async def _start_unstored(
        self, caller: Caller, job: ResponseJob, said: Sequence[ApiItem]
    ) -> Generation:
        messages = [*_instructions(job.request.instructions), *map(prompt_message, said)]
        prompt = await self._api.build(messages, "input")
        return self._api.start_stateless(caller, prompt, job.options, stored=False, param="input")

    async def _plan(
        self, caller: Caller, instructions: str, base: Base, items: Sequence[ApiItem]
    ) -> Plan:
        """Append to the base's chat, or begin another where its start is not the same."""
        added = [*base.waiting, *items]
        said = [*map(item_of, base.path), *added]
        key, system_text = _head(instructions, said[0])
        if base.chat_id is not None:
            prefix = await self._prefix_of(base)
            own = version_id(caller.user_id, key)
            if (prefix.assistant_version_id, prefix.tokenizer_digest) == (
                own,
                self._api.tokenizer.digest,
            ):
                return await self._appended(base, prefix, added)
        messages = [*_instructions(instructions), *map(prompt_message, said)]
        prompt = await self._api.build(messages, "input")
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

    async def _appended(self, base: Base, prefix: Prefix, added: Sequence[ApiItem]) -> Plan:
        """A chat's ids are those that the model saw: they are only added to."""
        history_ids, computed = history_of(base.path)
        try:
            new_ids = await asyncio.to_thread(
                self._api.prompts.follow, [prompt_message(item) for item in added]
            )
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

    async def _prefix_of(self, base: Base) -> Prefix:
        assert base.chat_id is not None, "only a chat has a prefix"
        return await self._repository.prefix_of_chat(base.chat_id)

    async def _store_end(self, job: ResponseJob, turn: Turn, generation: Generation) -> None:
        [answer] = generation.answers
        first = generation.first_token_at
        server_ttft_ms = None if first is None else (first - job.received_at) * 1e3
        outcome = outcome_of(answer.end, server_ttft_ms)
        if generation.cancelled and answer.end is None:
            outcome = Outcome("stopped")
        await self._repository.finish_turn(
            turn.id,
            status=outcome.status,
            finish_reason=outcome.finish_reason,
            error=outcome.error,
            text=answer.text,
            token_ids=answer.token_ids,
            latency=outcome.latency,
        )
        body = job.finished(generation, turn.message_id)
        await self._repository.set_response_body(job.response_id, body)

    async def stored_json(self, response: ApiResponse) -> dict[str, Any]:
        """A stored response as a client reads it, also when the server's end cut it off."""
        body = response.body
        if body["status"] == "in_progress":
            message = await self._repository.message(response.chat_id, response.message_id)
            if message is not None and message.status != "running":
                base = {name: value for name, value in body.items() if name != "status"}
                error = ApiError(message.error or "The answer was cut off.")
                return response_json(base, status="failed", error=error)
        return body

    async def inputs(self, response: ApiResponse) -> list[Message]:
        """The messages that came with a response's request."""
        path = await self._repository.path(response.chat_id, response.message_id)
        return path[-1 - response.num_inputs : -1]

    async def warm(self, caller: Caller, base: Base) -> int:
        """Have a kept chat's state brought back; how many tokens that is."""
        if base.chat_id is None:
            return 0
        prefix = await self._prefix_of(base)
        if prefix.tokenizer_digest != self._api.tokenizer.digest:
            return 0
        history_ids, computed = history_of(base.path)
        await self._api.engine.warm(
            Warm(
                chat_id=base.chat_id,
                prefix_ids=prefix.token_ids,
                history_ids=history_ids[:computed],
                prefix_scope=self._api.scope(caller),
            )
        )
        return len(prefix.token_ids) + computed


def _instructions(text: str | None) -> list[PromptMessage]:
    return [PromptMessage("system", text)] if text else []


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

"""Responses and conversations that the server keeps: chats, gone on with by what is new."""

from __future__ import annotations

from typing import Any

import msgspec

from app.api.bases import Base, Bases
from app.api.errors import invalid
from app.api.generation import Generation
from app.api.items import item_of, items_of
from app.api.keys import Caller
from app.api.messages import check_text
from app.api.plans import Plan, Plans
from app.api.response_shapes import ConversationRef
from app.api.responses import ResponseJob, cut_off_json
from app.api.service import Api
from app.message_text import title_of
from app.turn_records import Outcome, history_of, outcome_of
from engine.messages import SamplingParams, Submit, Warm
from sessions.queries.ids import new_id
from sessions.records import ApiResponse, Turn


class StoredChats:
    """Starts turns of kept chats. Stateless but for what it was given. Event loop only."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._repository = api.repository
        self._bases = Bases(api.repository)
        self._plans = Plans(api)

    async def base_of(self, caller: Caller, job: ResponseJob) -> Base:
        """What a response goes on from. Raises ApiError, TurnRunning."""
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
            found = await self._bases.conversation(caller, name, "conversation")
            job.base["conversation"] = {"id": f"conv_{found.id}"}
            return await self._bases.after_conversation(found)
        if request.previous_response_id is not None:
            return await self._bases.after_response(caller, request.previous_response_id)
        return Base()

    async def start(self, caller: Caller, job: ResponseJob) -> tuple[Generation, str]:
        """Begin the answer; with it the id of its item.

        Raises ApiError, TurnRunning, EngineUnavailable.
        """
        request, max_chars = job.request, self._api.settings.max_message_chars
        if request.instructions:
            check_text(request.instructions, "instructions", max_chars)
        instructions = request.instructions or ""
        items = items_of(request.input, "input", max_chars)
        base = await self.base_of(caller, job)
        plan = await self._plans.appended(caller, instructions, base, items)
        if request.store is False:
            if plan is not None:
                return await self._start_aside(caller, job, plan), new_id()
            said = [*map(item_of, base.path), *items]
            prompt = await self._plans.whole(instructions, said)
            generation = await self._api.start_stateless(
                caller, prompt, job.options, stored=False, param="input"
            )
            return generation, new_id()
        if plan is None:
            plan = await self._plans.new_chat(caller, instructions, base, items)
        sampling = self._api.fit(plan.num_tokens, job.options.sampling, "input")
        ticket = self._api.enter(caller, 1)
        try:
            turn = await self._repository.start_response(
                user_id=caller.user_id,
                response_id=job.response_id,
                prefix_id=plan.prefix.id,
                chat_id=plan.chat_id,
                parent_id=plan.parent_id,
                title=title_of(items[-1].text),
                items=plan.items,
                num_inputs=len(base.waiting) + len(items),
                sampling=msgspec.to_builtins(sampling),
                body=job.in_progress(),
                conversation=base.conversation,
            )
        except BaseException:
            ticket.leave()
            raise
        submit = self._submit(caller, job, plan, sampling, turn.id, turn.chat_id)

        async def ended(generation: Generation) -> None:
            await self._store_end(job, turn, generation)

        generation = self._api.generations.start(
            ticket, [submit], ended=ended, error_param="input", message_id=turn.message_id
        )
        return generation, turn.message_id

    async def _start_aside(self, caller: Caller, job: ResponseJob, plan: Plan) -> Generation:
        """An answer that goes on from a kept chat and leaves nothing there."""
        assert plan.chat_id is not None, "there is no chat to go on from"
        sampling = self._api.fit(plan.num_tokens, job.options.sampling, "input")
        ticket = self._api.enter(caller, 1)
        submit = self._submit(caller, job, plan, sampling, new_id(), plan.chat_id, saves=False)
        return self._api.generations.start(ticket, [submit], error_param="input")

    def _submit(
        self,
        caller: Caller,
        job: ResponseJob,
        plan: Plan,
        sampling: SamplingParams,
        request_id: str,
        chat_id: str,
        *,
        saves: bool = True,
    ) -> Submit:
        return Submit(
            request_id=request_id,
            chat_id=chat_id,
            prefix_ids=plan.prefix.token_ids,
            history_ids=plan.history_ids,
            history_computed=plan.history_computed,
            new_ids=plan.new_ids,
            sampling=sampling,
            prefix_scope=self._api.scope(caller),
            saves=saves,
            top_logprobs=job.options.top_logprobs,
            grammar=job.options.grammar,
        )

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
        if body["status"] != "in_progress":
            return body
        path = await self._repository.path(response.chat_id, response.message_id)
        if path[-1].status == "running":
            return body
        prefix = await self._repository.prefix_of_chat(response.chat_id)
        read = len(prefix.token_ids) + sum(len(one.token_ids) for one in path[:-1])
        return cut_off_json(body, path[-1], read)

    async def warm(self, caller: Caller, base: Base) -> int:
        """Have a kept chat's state brought back; how many tokens that is."""
        if base.chat_id is None:
            return 0
        prefix = await self._repository.prefix_of_chat(base.chat_id)
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

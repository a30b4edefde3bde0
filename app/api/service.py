"""What the API's handlers share: the way from a prompt to running answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from app.api.borrowed import KeptChats
from app.api.errors import context_exceeded, invalid, no_such_model
from app.api.generation import Answer, Generation, Generations
from app.api.keys import Caller
from app.api.limits import FairQueue, Ticket
from app.api.options import AnswerOptions
from app.api.progress import KeptProgress
from app.api.states import Found, States
from app.settings import Settings
from engine.client import Engine
from engine.errors import EngineUnavailable
from engine.messages import SamplingParams, Submit, Warm
from engine.model.prompt import PromptBuilder, PromptIds, PromptMessage
from engine.model.tokenizer import ChatTokenizer
from sessions.queries.ids import new_id
from sessions.repository import Repository

DEFAULT_MODEL = "default"  # whatever model the server has


class Api:
    """Owns the API's queue, its running answers and the hidden chats. Event loop only."""

    def __init__(
        self,
        *,
        settings: Settings,
        repository: Repository,
        engine: Engine,
        tokenizer: ChatTokenizer,
        forget_deleted: Callable[[], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.repository = repository
        self.engine = engine
        self.tokenizer = tokenizer
        self.prompts = PromptBuilder(tokenizer)
        self.queue = FairQueue(
            slots=settings.max_batch,
            per_user=settings.api_concurrency,
            waiting_per_user=settings.api_queue,
        )
        self.states = States(repository, engine, forget_deleted)
        self.generations = Generations(engine)
        self._progress = KeptProgress(repository, self.generations)
        self._kept_chats = KeptChats(repository)

    async def begin(self) -> None:
        await self.states.begin()
        self._progress.begin()

    async def save_progress(self) -> None:
        """Store what running answers of kept chats gained; done every second anyway."""
        await self._progress.save()

    def end_streams(self) -> None:
        """The server is about to end: so do all answers, each with an error for its client."""
        self._ending = asyncio.create_task(self.generations.close())

    async def close(self) -> None:
        """End running answers, then note what they left."""
        await self.generations.close()
        await self._progress.close()
        await self.states.close()

    # What requests have in common

    @property
    def model_name(self) -> str:
        return self.engine.info.model_name

    @property
    def context_limit(self) -> int:
        return self.engine.info.context_length

    @property
    def fingerprint(self) -> str:
        """Changes when answers to the same request may change."""
        return f"fp_{self.engine.info.fingerprint[:12]}"

    def check_model(self, name: str) -> None:
        """Raises ApiError."""
        if name not in (self.model_name, DEFAULT_MODEL):
            raise no_such_model(name)

    async def build(
        self,
        messages: Sequence[PromptMessage],
        param: str,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> PromptIds:
        """The ids of a whole chat. Raises ApiError."""
        try:
            return await asyncio.to_thread(self.prompts.build, messages, tools)
        except (ValueError, RecursionError) as error:
            raise invalid(param, f"'{param}' cannot be written for this model: {error}.") from error

    def fit(self, num_tokens: int, sampling: SamplingParams, param: str) -> SamplingParams:
        """Cut `max_tokens` to what the context still holds. Raises ApiError if nothing."""
        room = self.context_limit - num_tokens
        if room < 1:
            raise context_exceeded(num_tokens, self.context_limit, param)
        return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))

    def enter(self, caller: Caller, answers: int) -> Ticket:
        """A place in the API's queue. Raises ApiError, EngineUnavailable."""
        if answers > self.queue.per_user:
            raise invalid("n", f"'n' can be up to {self.queue.per_user} on this server.")
        if not self.engine.alive:
            raise EngineUnavailable("the engine is not running; it is being started again")
        return self.queue.enter(caller.user_id, caller.key_id, caller.max_requests, answers)

    def scope(self, caller: Caller) -> str:
        """Whose prefixes these are: a user's own, so that no time tells what others sent."""
        return f"u-{caller.user_id}"

    # Stateless calls

    def split(self, prompt: PromptIds, *, stored: bool) -> PromptIds:
        """What of a stateless prompt is shared prefix.

        One that would fill most of the context is not, and one that must stay in memory is not.
        """
        if not stored or len(prompt.prefix) > self.context_limit // 2 or not prompt.rest:
            return PromptIds([], [*prompt.prefix, *prompt.rest])
        return prompt

    async def find(
        self, caller: Caller, prompt: PromptIds, *, stored: bool
    ) -> tuple[PromptIds, Found]:
        """The chat that a prompt goes on from, or a new one, and the prompt as it is for that.

        That is one of the hidden chats, or one that the user keeps, if it is at least half of the
        prompt: what is added to it is not saved.
        """
        split = self.split(prompt, stored=stored)
        found = self.states.find(caller.user_id, split.prefix, split.rest, stored=stored)
        kept = await self._kept_chats.find(caller.user_id, prompt.prefix, prompt.rest)
        if kept is None or 2 * kept.agreed < len(prompt.rest):
            return split, found
        if len(prompt.prefix) + kept.agreed <= len(split.prefix) + found.agreed:
            return split, found
        return prompt, kept

    async def start_stateless(
        self,
        caller: Caller,
        prompt: PromptIds,
        options: AnswerOptions,
        *,
        stored: bool,
        param: str,
    ) -> Generation:
        """Begin the answers to a whole prompt, from what the user's chats and calls left of it.

        Raises ApiError, EngineUnavailable.
        """
        num_tokens = len(prompt.prefix) + len(prompt.rest)
        sampling = self.fit(num_tokens, options.sampling, param)
        prompt, found = await self.find(caller, prompt, stored=stored)
        ticket = self.enter(caller, options.answers)
        self.states.use(found.chat_id)
        history = min(found.agreed, len(prompt.rest) - 1)
        submits = [
            Submit(
                request_id=new_id(),
                chat_id=found.chat_id,
                prefix_ids=prompt.prefix,
                history_ids=prompt.rest[:history],
                history_computed=min(history, found.computed),
                new_ids=prompt.rest[history:],
                sampling=sampling,
                prefix_scope=found.scope or self.scope(caller),
                saves=stored and not found.borrowed,
                candidate=candidate,
                top_logprobs=options.top_logprobs,
                logit_bias=dict(options.logit_bias),
                grammar=options.grammar,
            )
            for candidate in range(options.answers)
        ]

        async def note(generation: Generation) -> None:
            self.states.release(found.chat_id)
            answers = [_ids_of(one) for one in generation.answers if one.stats is not None]
            if answers and not found.borrowed:
                self.states.keep(
                    caller.user_id, found, prompt.prefix, prompt.rest, answers, stored=stored
                )

        return self.generations.start(ticket, submits, ended=note, error_param=param)

    async def warm_stateless(self, caller: Caller, prompt: PromptIds) -> int:
        """Have the state that a prompt would go on from brought back; how many tokens that is."""
        prompt, found = await self.find(caller, prompt, stored=True)
        if found.computed:
            await self.engine.warm(
                Warm(
                    chat_id=found.chat_id,
                    prefix_ids=prompt.prefix,
                    history_ids=prompt.rest[: found.computed],
                    prefix_scope=found.scope or self.scope(caller),
                )
            )
        return found.computed


def _ids_of(answer: Answer) -> tuple[list[int], bool]:
    return answer.token_ids, answer.finish == "eos"

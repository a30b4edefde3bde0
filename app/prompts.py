"""What the engine is given for a turn: prefix, history, new tokens, and how to sample."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from app.assistants.shared_text import AssistantPrefixes
from app.faults import WrongModel
from app.turn_records import history_of
from engine.client import Engine
from engine.errors import ContextOverflow
from engine.messages import SamplingParams, Submit
from engine.model.output import OutputText
from engine.model.tokenizer import ChatTokenizer
from sessions.records import Assistant, Chat, Message, Prefix, Turn
from sessions.repository import Repository


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The tokens before an answer, and how it is sampled; the same for all candidates."""

    prefix: Prefix
    scope: str  # the assistant
    history_ids: list[int]
    history_computed: int
    new_ids: list[int]
    sampling: SamplingParams
    answered: int = 0

    def submit(self, turn: Turn, candidate: int) -> Submit:
        return Submit(
            request_id=turn.id,
            chat_id=turn.chat_id,
            prefix_ids=self.prefix.token_ids,
            history_ids=self.history_ids,
            history_computed=self.history_computed,
            new_ids=self.new_ids,
            sampling=self.sampling,
            prefix_scope=self.scope,
            candidate=candidate,
            answered=self.answered,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The sampling as it is stored with the turn."""
        settings: dict[str, Any] = msgspec.to_builtins(self.sampling)
        return settings


class Prompts:
    """Makes prompts of chats; stateless but for what it was given. Event loop only."""

    def __init__(self, *, repository: Repository, engine: Engine, tokenizer: ChatTokenizer) -> None:
        self._repository = repository
        self._engine = engine
        self._tokenizer = tokenizer
        self._prefixes = AssistantPrefixes(repository, tokenizer)

    @property
    def tokenizer_digest(self) -> str:
        return self._tokenizer.digest

    @property
    def context_limit(self) -> int:
        return self._engine.info.context_length

    async def of_new_chat(self, assistant: Assistant, text: str) -> Prompt:
        """Raises ContextOverflow."""
        prefix = await self._prefixes.current(assistant.id)
        new_ids = await self.user_ids(text, first=True)
        sampling = self._sampling(assistant.sampling)
        return self._fitted(prefix, assistant.id, [], 0, new_ids, sampling)

    async def of_message(self, chat: Chat, path: Sequence[Message], text: str) -> Prompt:
        """For a new message after the last of `path`. Raises WrongModel, ContextOverflow."""
        prefix = await self.prefix_of(chat)
        new_ids = await self.user_ids(text, first=not path)
        sampling = await self._sampling_of(chat)
        return self._fitted(prefix, chat.assistant_id, *history_of(path), new_ids, sampling)

    async def of_question(self, chat: Chat, path: Sequence[Message]) -> Prompt:
        """For another answer to the last message of `path`. Raises WrongModel, ContextOverflow."""
        *before, question = path
        prefix = await self.prefix_of(chat)
        sampling = await self._sampling_of(chat)
        history_ids, computed = history_of(before)
        new_ids = question.token_ids
        return self._fitted(prefix, chat.assistant_id, history_ids, computed, new_ids, sampling)

    async def of_answer(self, chat: Chat, path: Sequence[Message], turn: Turn) -> Prompt:
        """To go on with the last answer of `path` as its `turn` would have gone on.

        The model runs its last token, which it has not seen. Raises WrongModel, ContextOverflow.
        """
        prefix = await self.prefix_of(chat)
        ids = [token for message in path for token in message.token_ids]
        now = await self._sampling_of(chat)
        sampling = msgspec.convert(
            {**turn.sampling, "max_tokens": now.max_tokens}, SamplingParams, strict=False
        )
        answered = len(path[-1].token_ids)
        return self._fitted(
            prefix, chat.assistant_id, ids[:-1], len(ids) - 1, ids[-1:], sampling, answered
        )

    def certain_text(self, answer: Message, prompt: Prompt) -> str:
        """The text of an answer that is gone on with, less what its next tokens may change.

        That is an unfinished character, and what may become a stop string.
        """
        text = OutputText(self._tokenizer, prompt.sampling.stop)
        return "".join(text.push(token)[0] for token in answer.token_ids)

    async def latest_prefix(self, chat: Chat) -> Prefix:
        """Of the latest version that the chat's user may begin a chat with.

        When the assistant was deleted, or is another user's alone by now, that is the chat's own.
        """
        if await self._repository.assistant(chat.user_id, chat.assistant_id) is not None:
            return await self._prefixes.current(chat.assistant_id)
        own = await self._repository.prefix_by_id(chat.prefix_id)
        version = await self._repository.version(own.assistant_version_id)
        return await self._prefixes.of(version)

    async def prefix_of(self, chat: Chat) -> Prefix:
        """Raises WrongModel."""
        prefix = await self._repository.prefix_by_id(chat.prefix_id)
        if prefix.tokenizer_digest != self._tokenizer.digest:
            raise WrongModel(chat.id)
        return prefix

    async def user_ids(self, text: str, *, first: bool) -> list[int]:
        return await asyncio.to_thread(self._tokenizer.user_ids, text, first=first)

    async def answer_ids(self, text: str) -> list[int]:
        return await asyncio.to_thread(self._tokenizer.encode_text, text)

    def _sampling(self, overrides: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams(**{"seed": secrets.randbits(31), **overrides})

    async def _sampling_of(self, chat: Chat) -> SamplingParams:
        return self._sampling(await self._repository.assistant_sampling(chat.assistant_id))

    def _fitted(
        self,
        prefix: Prefix,
        scope: str,
        history_ids: list[int],
        history_computed: int,
        new_ids: list[int],
        sampling: SamplingParams,
        answered: int = 0,
    ) -> Prompt:
        """With `max_tokens` cut to what the context still holds. Raises ContextOverflow if none."""
        num_tokens = len(prefix.token_ids) + len(history_ids) + len(new_ids)
        room = self.context_limit - num_tokens
        if room < 1:
            raise ContextOverflow(num_tokens, self.context_limit)
        max_tokens = min(sampling.max_tokens, room)
        return Prompt(
            prefix=prefix,
            scope=scope,
            history_ids=history_ids,
            history_computed=history_computed,
            new_ids=new_ids,
            sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens),
            answered=answered,
        )

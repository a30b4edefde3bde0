"""The life of a turn, from the posted text to the stored answer and its measurements.

    text checked -> place in the engine's queue -> token ids -> context checked
    -> user's message and empty answer committed -> submitted -> events into the live turn
    -> progress saved about every second -> answer and latency record committed

A turn belongs to the server: it goes on when nobody watches. Only Stop, the deletion of its chat,
the engine's death or the end of the server cut it short.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from app.faults import ChatMoved, InvalidField, NotRetryable, WrongModel
from app.message_text import clean_text, title_of
from app.streams import LiveTurn, TurnHub
from app.turn_records import Outcome, history_of, outcome_of
from app.upkeep import Upkeep
from engine.client import Engine, Reservation, TurnStream
from engine.errors import ContextOverflow, EngineUnavailable
from engine.messages import Delta, Done, Failed, SamplingParams, Status, Submit, Warm
from engine.model.tokenizer import ChatTokenizer
from sessions.errors import NotFound, TurnRunning
from sessions.records import Chat, Message, Prefix, Turn
from sessions.repository import Repository

logger = logging.getLogger(__name__)

STORE_AGAIN_S = (1.0, 2.0, 5.0, 15.0, 30.0)  # then every 30 s
RETRYABLE = frozenset({"interrupted", "failed", "stopped"})


class ChatService:
    """Owns the tasks that feed running turns. Event loop only."""

    def __init__(
        self,
        *,
        repository: Repository,
        engine: Engine,
        tokenizer: ChatTokenizer,
        hub: TurnHub,
        upkeep: Upkeep,
        max_message_chars: int,
    ) -> None:
        self._repository = repository
        self._engine = engine
        self._tokenizer = tokenizer
        self._hub = hub
        self._upkeep = upkeep
        self._max_message_chars = max_message_chars
        self._starting: set[str] = set()  # chats between check and commit of a turn
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    @property
    def context_limit(self) -> int:
        return self._engine.info.context_length

    # Starting turns

    async def start_chat(
        self, user_id: str, assistant_id: str, raw_text: str, *, received_at: float
    ) -> Turn:
        """Begin a chat with its first turn.

        Raises InvalidField, QueueFull, EngineUnavailable, ContextOverflow.
        """
        text = clean_text(raw_text, self._max_message_chars)
        with self._place() as reservation:
            known = {one.id: one for one in await self._repository.assistants(user_id)}
            if assistant_id not in known:
                raise InvalidField("assistant_id", "Choose one of the assistants shown.")
            version = await self._repository.assistant_version(assistant_id)
            prefix_ids = await asyncio.to_thread(self._tokenizer.prefix_ids, version.system_prompt)
            new_ids = await asyncio.to_thread(self._tokenizer.user_ids, text, first=True)
            sampling = self._sampling(known[assistant_id].sampling)
            sampling = self._fit(len(prefix_ids) + len(new_ids), sampling)
            prefix = await self._repository.prefix(version.id, self._tokenizer.digest, prefix_ids)
            turn = await self._repository.start_chat(
                user_id,
                prefix.id,
                title_of(text),
                user_text=text,
                user_token_ids=new_ids,
                sampling=msgspec.to_builtins(sampling),
            )
            self._submit(turn, prefix, [], new_ids, sampling, reservation, received_at)
        return turn

    async def send_message(
        self, chat: Chat, parent_id: str | None, raw_text: str, *, received_at: float
    ) -> Turn:
        """Append a message to the chat's active branch and begin its answer.

        Raises ChatMoved when `parent_id` is no longer the last message, TurnRunning, InvalidField,
        WrongModel, QueueFull, EngineUnavailable, ContextOverflow.
        """
        text = clean_text(raw_text, self._max_message_chars)
        with self._place() as reservation, self._only_one(chat.id):
            if await self._repository.running_turn(chat.id) is not None:
                raise TurnRunning(chat.id)
            path = await self._repository.path(chat.id)
            if parent_id != (path[-1].id if path else None):
                raise ChatMoved(chat.id)
            prefix = await self._prefix(chat)
            new_ids = await asyncio.to_thread(self._tokenizer.user_ids, text, first=not path)
            used = len(prefix.token_ids) + sum(len(one.token_ids) for one in path) + len(new_ids)
            sampling = self._fit(used, await self._sampling_of(chat))
            turn = await self._repository.start_turn(
                chat.id,
                parent_id=parent_id,
                user_text=text,
                user_token_ids=new_ids,
                sampling=msgspec.to_builtins(sampling),
            )
            self._submit(turn, prefix, path, new_ids, sampling, reservation, received_at)
        return turn

    async def retry(self, chat: Chat, message_id: str, *, received_at: float) -> Turn:
        """Answer the last user's message again, beside the answer that was cut short.

        Raises NotRetryable, TurnRunning, WrongModel, QueueFull, EngineUnavailable, ContextOverflow.
        """
        with self._place() as reservation, self._only_one(chat.id):
            path = await self._repository.path(chat.id)
            if len(path) < 2 or path[-1].id != message_id or path[-1].status not in RETRYABLE:
                raise NotRetryable(chat.id)
            *before, question, _ = path
            prefix = await self._prefix(chat)
            used = len(prefix.token_ids) + sum(len(one.token_ids) for one in path[:-1])
            sampling = self._fit(used, await self._sampling_of(chat))
            turn = await self._repository.retry_turn(
                chat.id, message_id, msgspec.to_builtins(sampling)
            )
            new_ids = question.token_ids
            self._submit(turn, prefix, before, new_ids, sampling, reservation, received_at)
        return turn

    @contextlib.contextmanager
    def _place(self) -> Iterator[Reservation]:
        """A place in the engine's queue, given back unless a turn was submitted with it."""
        reservation = self._engine.reserve()
        try:
            yield reservation
        except BaseException:
            reservation.release()
            raise

    @contextlib.contextmanager
    def _only_one(self, chat_id: str) -> Iterator[None]:
        """Of two requests at once to start a turn of a chat, the second raises TurnRunning."""
        if chat_id in self._starting:
            raise TurnRunning(chat_id)
        self._starting.add(chat_id)
        try:
            yield
        finally:
            self._starting.discard(chat_id)

    async def _prefix(self, chat: Chat) -> Prefix:
        prefix = await self._repository.prefix_by_id(chat.prefix_id)
        if prefix.tokenizer_digest != self._tokenizer.digest:
            raise WrongModel(chat.id)
        return prefix

    def _sampling(self, overrides: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams(**{"seed": secrets.randbits(31), **overrides})

    async def _sampling_of(self, chat: Chat) -> SamplingParams:
        known = await self._repository.assistants(chat.user_id)
        overrides = next((one.sampling for one in known if one.id == chat.assistant_id), {})
        return self._sampling(overrides)

    def _fit(self, num_tokens: int, sampling: SamplingParams) -> SamplingParams:
        """Cut `max_tokens` to what the context still holds. Raises ContextOverflow if nothing."""
        room = self.context_limit - num_tokens
        if room < 1:
            raise ContextOverflow(num_tokens, self.context_limit)
        return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))

    # Running turns

    def _submit(
        self,
        turn: Turn,
        prefix: Prefix,
        path: Sequence[Message],
        new_ids: list[int],
        sampling: SamplingParams,
        reservation: Reservation,
        received_at: float,
    ) -> None:
        history_ids, history_computed = history_of(path)
        live = self._hub.open(turn_id=turn.id, chat_id=turn.chat_id, message_id=turn.message_id)
        submit = Submit(
            request_id=turn.id,
            chat_id=turn.chat_id,
            prefix_ids=prefix.token_ids,
            history_ids=history_ids,
            history_computed=history_computed,
            new_ids=new_ids,
            sampling=sampling,
        )
        events = self._engine.submit(submit, reservation)
        self._tasks[turn.id] = asyncio.create_task(
            self._run(live, events, received_at), name=f"turn {turn.id}"
        )

    async def _run(self, live: LiveTurn, events: TurnStream, received_at: float) -> None:
        """Feed the live turn from the engine until its end, then store the answer."""
        first_token_at: float | None = None
        end: Done | Failed | None = None
        try:
            async for event in events:
                match event:
                    case Status():
                        live.set_status(event.phase, event.done, event.total)
                    case Delta():
                        if first_token_at is None and event.token_ids:
                            first_token_at = time.monotonic()
                        live.append(event.text, event.token_ids)
                    case Done() | Failed():
                        end = event
        except asyncio.CancelledError:
            logger.info("turn %s is cut off", live.turn_id)
        server_ttft_ms = None if first_token_at is None else (first_token_at - received_at) * 1e3
        outcome = outcome_of(end, self._engine.info, server_ttft_ms)
        try:
            await self._store_end(live, outcome)
        finally:
            self._tasks.pop(live.turn_id, None)
            self._hub.close(live)

    async def _store_end(self, live: LiveTurn, outcome: Outcome) -> None:
        """Store the answer; a database that refuses (a full disk) is asked again and again.

        When the server ends meanwhile, the saved progress stands and the next start marks the
        answer as interrupted.
        """
        for delay_s in itertools.chain(STORE_AGAIN_S, itertools.repeat(STORE_AGAIN_S[-1])):
            try:
                await self._repository.finish_turn(
                    live.turn_id,
                    status=outcome.status,
                    finish_reason=outcome.finish_reason,
                    error=outcome.error,
                    text=live.text,
                    token_ids=live.token_ids,
                    latency=outcome.latency,
                )
                return
            except Exception:
                logger.exception("the end of turn %s could not be stored", live.turn_id)
            if self._closing:
                return
            await asyncio.sleep(delay_s)

    async def stop(self, turn_id: str) -> None:
        """Stop a turn; returns when the engine confirmed it and the answer so far is stored."""
        live = self._hub.get(turn_id)
        if live is not None:
            await self._engine.cancel(turn_id)
            await live.wait_ended()

    # Chats as a whole

    async def warm(self, chat: Chat) -> None:
        """Have the state of a chat that is being looked at brought back; a hint, never an error."""
        if self._hub.of_chat(chat.id) is not None:
            return
        with contextlib.suppress(EngineUnavailable, WrongModel, NotFound):
            prefix = await self._prefix(chat)
            history_ids, computed = history_of(await self._repository.path(chat.id))
            await self._engine.warm(
                Warm(
                    chat_id=chat.id,
                    prefix_ids=prefix.token_ids,
                    history_ids=history_ids[:computed],
                )
            )

    async def delete(self, user_id: str, chat_id: str) -> bool:
        """Stop what runs, purge the rows, then have the engine drop what it holds.

        False when there is no such chat of this user.
        """
        if await self._repository.chat(user_id, chat_id) is None:
            return False
        with self._only_one(chat_id):
            live = self._hub.of_chat(chat_id)
            if live is not None:
                await self.stop(live.turn_id)
            deleted = await self._repository.delete_chat(user_id, chat_id)
        await self._upkeep.forget_deleted()
        return deleted

    async def close(self) -> None:
        """End every running turn as interrupted, with what it has."""
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

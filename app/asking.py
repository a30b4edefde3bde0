"""Asking: anew, otherwise, again, for more of an answer.

    text checked -> places in the engine's queue -> token ids -> context checked
    -> user's message, empty answers and their turns committed -> submitted (`app.turn_runner`)

A turn belongs to the server: it goes on when nobody watches. Only Stop, the deletion of its chat,
the engine's death or the end of the server cut it short. Of a chat one group of turns runs at a
time: one answer, or candidates for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from app.faults import ChatMoved, InvalidField, NotContinuable, NotRetryable
from app.message_text import clean_text, title_of
from app.prompts import Prompt, Prompts
from app.queued_messages import QueuedMessages
from app.streams import TurnHub
from app.turn_records import RETRYABLE, can_go_on
from app.turn_runner import TurnRunner
from engine.client import Engine, Reservation
from engine.model.tokenizer import ChatTokenizer
from sessions.errors import AlreadyQueued, NotRunning, TurnRunning
from sessions.records import Chat, Message, QueuedMessage, Turn
from sessions.repository import Repository

MAX_ANSWERS = 4  # to one question at once


class Asking:
    """Base of `ChatService`: owns which chats are about to begin a turn. Event loop only."""

    def __init__(
        self,
        *,
        repository: Repository,
        engine: Engine,
        tokenizer: ChatTokenizer,
        hub: TurnHub,
        max_message_chars: int,
    ) -> None:
        self._repository = repository
        self._engine = engine
        self._max_message_chars = max_message_chars
        self._prompts = Prompts(repository=repository, engine=engine, tokenizer=tokenizer)
        self._starting: set[str] = set()  # chats between check and commit of their turns
        self.queued = QueuedMessages(repository=repository, send=self.send_queued)
        self._runner = TurnRunner(
            repository=repository, engine=engine, hub=hub, after_end=self.queued.answer_ended
        )

    @property
    def context_limit(self) -> int:
        return self._prompts.context_limit

    # Starting turns

    async def start_chat(
        self,
        user_id: str,
        assistant_id: str,
        raw_text: str,
        *,
        answers: int = 1,
        received_at: float,
    ) -> Turn:
        """Begin a chat with its first turn; returns that, or the first of its candidates.

        Raises InvalidField, QueueFull, EngineUnavailable, ContextOverflow.
        """
        text = clean_text(raw_text, self._max_message_chars)
        with self._places(answers) as places:
            known = {one.id: one for one in await self._repository.assistants(user_id)}
            if assistant_id not in known:
                raise InvalidField("assistant_id", "Choose one of the assistants shown.")
            prompt = await self._prompts.of_new_chat(known[assistant_id], text)
            turns = await self._repository.start_chat(
                user_id,
                prompt.prefix.id,
                title_of(text),
                user_text=text,
                user_token_ids=prompt.new_ids,
                sampling=prompt.settings,
                candidates=answers,
            )
            self._run(turns, prompt, places, received_at)
        return turns[0]

    async def send(
        self,
        chat: Chat,
        parent_id: str | None,
        raw_text: str,
        *,
        answers: int = 1,
        received_at: float,
    ) -> list[Turn]:
        """Append a message to the chat's active branch and begin its answers.

        One that follows an answer which is still being written is queued: no turn is returned.
        Raises ChatMoved when `parent_id` is no longer the last message, TurnRunning,
        AlreadyQueued, InvalidField, WrongModel, QueueFull, EngineUnavailable, ContextOverflow.
        """
        text = clean_text(raw_text, self._max_message_chars)
        running = {turn.message_id for turn in await self._repository.running_turns(chat.id)}
        if parent_id in running:
            with contextlib.suppress(NotRunning):  # it has ended just now
                await self._repository.queue_message(chat.id, text)
                return []
        elif running:
            raise TurnRunning(chat.id)
        waiting = await self._repository.queued_message(chat.id)
        if waiting is not None and waiting.problem is None:
            raise AlreadyQueued(chat.id)
        with self._places(answers) as places, self._only_one(chat.id):
            path = await self._repository.path(chat.id)
            if parent_id != (path[-1].id if path else None):
                raise ChatMoved(chat.id)
            prompt = await self._prompts.of_message(chat, path, text)
            return await self._ask(chat, parent_id, text, prompt, answers, places, received_at)

    async def edit(
        self,
        chat: Chat,
        message_id: str,
        raw_text: str,
        *,
        answers: int = 1,
        received_at: float,
    ) -> list[Turn]:
        """Ask otherwise: a branch beside a user's message of the active one, and its answers.

        Raises ChatMoved when that message is not on the active branch, and as `send`.
        """
        text = clean_text(raw_text, self._max_message_chars)
        with self._places(answers) as places, self._only_one(chat.id):
            path = await self._resting_path(chat)
            before = _before(chat, path, message_id, "user")
            prompt = await self._prompts.of_message(chat, before, text)
            parent_id = before[-1].id if before else None
            return await self._ask(chat, parent_id, text, prompt, answers, places, received_at)

    async def send_queued(self, chat: Chat, queued: QueuedMessage) -> None:
        """Append the queued message to the active branch and begin its answer.

        Raises NotFound when it was withdrawn meanwhile, and as `send`.
        """
        with self._places(1) as places, self._only_one(chat.id):
            path = await self._repository.path(chat.id)
            prompt = await self._prompts.of_message(chat, path, queued.text)
            turn = await self._repository.start_queued(
                chat.id,
                parent_id=path[-1].id,
                user_text=queued.text,
                user_token_ids=prompt.new_ids,
                sampling=prompt.settings,
            )
            self._run([turn], prompt, places, time.monotonic())

    async def answer_again(
        self, chat: Chat, message_id: str, *, answers: int = 1, received_at: float
    ) -> list[Turn]:
        """Have a user's message answered again, beside an answer of the active branch.

        Raises ChatMoved when that answer is not on it, TurnRunning, WrongModel, QueueFull,
        EngineUnavailable, ContextOverflow.
        """
        with self._places(answers) as places, self._only_one(chat.id):
            path = await self._resting_path(chat)
            asked = _before(chat, path, message_id, "assistant")
            prompt = await self._prompts.of_question(chat, asked)
            turns = await self._repository.answer_again(
                chat.id, message_id, prompt.settings, candidates=answers
            )
            await self._repository.set_queue_problem(chat.id, None)
            self._run(turns, prompt, places, received_at)
        return turns

    async def retry(self, chat: Chat, message_id: str, *, received_at: float) -> Turn:
        """Answer the last user's message again, beside the answer that was cut short.

        Raises NotRetryable when it was not, and as `answer_again`.
        """
        path = await self._repository.path(chat.id)
        if len(path) < 2 or path[-1].id != message_id or path[-1].status not in RETRYABLE:
            raise NotRetryable(chat.id)
        [turn] = await self.answer_again(chat, message_id, received_at=received_at)
        return turn

    async def go_on(self, chat: Chat, message_id: str, *, received_at: float) -> Turn:
        """Have the model go on with the last answer, which was cut short, in the same message.

        Raises NotContinuable, TurnRunning, WrongModel, QueueFull, EngineUnavailable,
        ContextOverflow.
        """
        with self._places(1) as places, self._only_one(chat.id):
            path = await self._resting_path(chat)
            before = await self._repository.turn_of(chat.id, message_id)
            if not path or path[-1].id != message_id or not can_go_on(path[-1]) or not before:
                raise NotContinuable(chat.id)
            prompt = await self._prompts.of_answer(chat, path, before)
            so_far = self._prompts.certain_text(path[-1], prompt)
            turn = await self._repository.continue_turn(chat.id, message_id, prompt.settings)
            await self._repository.set_queue_problem(chat.id, None)
            submit = prompt.submit(turn, path[-1].candidate)
            self._runner.start([(turn, submit, places[0])], received_at=received_at, so_far=so_far)
        return turn

    async def _resting_path(self, chat: Chat) -> list[Message]:
        """The active branch of a chat in which nothing runs. Raises TurnRunning."""
        if await self._repository.running_turns(chat.id):
            raise TurnRunning(chat.id)
        return await self._repository.path(chat.id)

    async def _ask(
        self,
        chat: Chat,
        parent_id: str | None,
        text: str,
        prompt: Prompt,
        answers: int,
        places: Sequence[Reservation],
        received_at: float,
    ) -> list[Turn]:
        turns = await self._repository.start_turns(
            chat.id,
            parent_id=parent_id,
            user_text=text,
            user_token_ids=prompt.new_ids,
            sampling=prompt.settings,
            candidates=answers,
        )
        self._run(turns, prompt, places, received_at)
        return turns

    def _run(
        self,
        turns: Sequence[Turn],
        prompt: Prompt,
        places: Sequence[Reservation],
        received_at: float,
    ) -> None:
        group = [
            (turn, prompt.submit(turn, candidate), place)
            for candidate, (turn, place) in enumerate(zip(turns, places, strict=True))
        ]
        self._runner.start(group, received_at=received_at)

    @contextlib.contextmanager
    def _places(self, count: int) -> Iterator[list[Reservation]]:
        """Places in the engine's queue, given back unless turns were submitted with them."""
        places: list[Reservation] = []
        try:
            for _ in range(count):
                places.append(self._engine.reserve())
            yield places
        except BaseException:
            for place in places:
                place.release()
            raise

    @contextlib.contextmanager
    def _only_one(self, chat_id: str) -> Iterator[None]:
        """Of two requests at once to start turns of a chat, the second raises TurnRunning."""
        if chat_id in self._starting:
            raise TurnRunning(chat_id)
        self._starting.add(chat_id)
        try:
            yield
        finally:
            self._starting.discard(chat_id)


def _before(chat: Chat, path: Sequence[Message], message_id: str, role: str) -> list[Message]:
    """The messages of a path before one of this role. Raises ChatMoved when it is not there."""
    for number, message in enumerate(path):
        if message.id == message_id and message.role == role:
            return list(path[:number])
    raise ChatMoved(chat.id)

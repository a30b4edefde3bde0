"""The part of the repository that is about turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sessions.clock import Clock
from sessions.database import Database
from sessions.queries import carried, chats, queued, turn_ends, turns
from sessions.records import (
    Carried,
    CarriedMessage,
    Chat,
    EndStatus,
    Latency,
    Message,
    Progress,
    QueuedMessage,
    Turn,
)


class TurnRepository:
    """Base of `Repository`. Of a chat's turns only those of one group run at once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._clock = Clock()

    # Beginning

    async def start_chat(
        self,
        user_id: str,
        prefix_id: str,
        title: str,
        *,
        user_text: str,
        user_token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        candidates: int = 1,
    ) -> list[Turn]:
        """A new chat and its first turns in one transaction. Raises NotFound as `create_chat`."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: turns.start_chat(
                db, user_id, prefix_id, title, user_text, user_token_ids, sampling, candidates, now
            )
        )

    async def start_turns(
        self,
        chat_id: str,
        *,
        parent_id: str | None,
        user_text: str,
        user_token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        candidates: int = 1,
    ) -> list[Turn]:
        """The user's message, so many empty running answers and their turns, in one transaction.

        `parent_id` is the answer to go on from, or None for a (new) first message; a message that
        has one already gets a sibling. The first answer becomes the active leaf. Raises NotFound
        (chat), StaleParent, TurnRunning.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: turns.start(
                db, chat_id, parent_id, user_text, user_token_ids, sampling, candidates, now
            )
        )

    async def answer_again(
        self, chat_id: str, message_id: str, sampling: Mapping[str, Any], *, candidates: int = 1
    ) -> list[Turn]:
        """Answer the same user's message again, by siblings of the answer `message_id`.

        Raises NotFound (no such answer in this chat), TurnRunning.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: turns.retry(db, chat_id, message_id, sampling, candidates, now)
        )

    async def continue_turn(
        self, chat_id: str, message_id: str, sampling: Mapping[str, Any]
    ) -> Turn:
        """A further turn for an answer that has ended, which runs again with what it has.

        It becomes the active leaf. Raises NotFound (no such answer in this chat), TurnRunning.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: turns.go_on(db, chat_id, message_id, sampling, now)
        )

    async def carry_over(
        self,
        user_id: str,
        prefix_id: str,
        title: str,
        messages: Sequence[CarriedMessage],
        carried_from: Carried,
    ) -> str:
        """A new chat that begins with these messages; returns its id. Raises NotFound."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: carried.create(db, user_id, prefix_id, title, messages, carried_from, now)
        )

    # Looking up

    async def turn(self, user_id: str, turn_id: str) -> Turn | None:
        """None when there is no such turn or its chat is another user's."""
        async with self._database.read() as db:
            return await turns.owned(db, user_id, turn_id)

    async def chat_by_id(self, chat_id: str) -> Chat | None:
        """For the server's own work: whosever it is. None when there is none, or it is deleted."""
        async with self._database.read() as db:
            return await chats.by_id(db, chat_id)

    async def running_turns(self, chat_id: str) -> list[Turn]:
        """Those of one group, by candidate; empty when nothing runs."""
        async with self._database.read() as db:
            return await turns.running(db, chat_id)

    async def turn_of(self, chat_id: str, message_id: str) -> Turn | None:
        """The latest turn of this answer; None when the chat has no such answer."""
        async with self._database.read() as db:
            return await turns.of_answer(db, chat_id, message_id)

    async def candidates(self, chat_id: str, group_id: str) -> list[Message]:
        """The answers that were asked for together, in their order."""
        async with self._database.read() as db:
            return await chats.group(db, chat_id, group_id)

    # Going on and ending

    async def save_progress(self, progress: Sequence[Progress]) -> None:
        """Store what running answers have so far, all or none; ended ones stay as they are."""
        await self._database.write(lambda db: turn_ends.save_progress(db, progress))

    async def finish_turn(
        self,
        turn_id: str,
        *,
        status: EndStatus,
        finish_reason: str | None,
        error: str | None,
        text: str,
        token_ids: Sequence[int],
        latency: Latency | None,
        first_token_ms: float | None = None,
    ) -> bool:
        """End a turn: its answer and its measurements, in one transaction.

        `first_token_ms` is from the server's receipt of the message, whether or not the engine
        measured the rest. False, and nothing is changed, when the turn ended before or its chat
        was deleted.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: turn_ends.finish(
                db,
                turn_id,
                status,
                finish_reason,
                error,
                text,
                token_ids,
                latency,
                first_token_ms,
                now,
            )
        )

    async def interrupt_running(self) -> list[Turn]:
        """End every running turn as interrupted, its answer as last saved; returns those turns.

        For the start after a crash, and for the death of the engine process. Later times are given
        from here on than the last turn has.
        """
        async with self._database.read() as db:
            latest = await turns.latest(db)
        if latest is not None:
            self._clock.not_before(latest)
        now = self._clock.now()
        return await self._database.write(lambda db: turn_ends.interrupt_running(db, now))

    # The queued message

    async def queue_message(self, chat_id: str, text: str) -> None:
        """Keep a message until the running answer has ended.

        Raises NotFound, AlreadyQueued (a chat keeps one), NotRunning.
        """
        now = self._clock.now()
        await self._database.write(lambda db: queued.put(db, chat_id, text, now))

    async def queued_message(self, chat_id: str) -> QueuedMessage | None:
        async with self._database.read() as db:
            return await queued.of_chat(db, chat_id)

    async def chats_with_queued(self) -> list[str]:
        """Chats whose queued message waits for an answer's end and not for its user."""
        async with self._database.read() as db:
            return await queued.waiting(db)

    async def set_queue_problem(self, chat_id: str, problem: str | None) -> None:
        """Why the queued message waits for its user; None lets it go when an answer has ended."""
        await self._database.write(lambda db: queued.set_problem(db, chat_id, problem))

    async def withdraw_queued(self, chat_id: str) -> str | None:
        """Remove the queued message; returns its text, None when there is none (any more)."""
        return await self._database.write(lambda db: queued.take(db, chat_id))

    async def start_queued(
        self,
        chat_id: str,
        *,
        parent_id: str,
        user_text: str,
        user_token_ids: Sequence[int],
        sampling: Mapping[str, Any],
    ) -> Turn:
        """Turn the queued message into a turn, in one transaction.

        Raises as `start_turns`, and NotFound when that text is not queued (any more).
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: turns.start_queued(
                db, chat_id, parent_id, user_text, user_token_ids, sampling, now
            )
        )

"""What people do with chats: ask in them, stop answers, choose versions, carry over, leave."""

from __future__ import annotations

import contextlib

from app.asking import MAX_ANSWERS, Asking
from app.assistants.moving import move_to_latest
from app.carry_over import carry_over
from app.streams import TurnHub
from app.turn_records import history_of
from app.upkeep import Upkeep
from engine.client import Engine
from engine.errors import EngineUnavailable
from engine.messages import Warm
from engine.model.tokenizer import ChatTokenizer
from sessions.errors import NotFound, TurnRunning
from sessions.records import Chat
from sessions.repository import Repository

__all__ = ["MAX_ANSWERS", "ChatService"]


class ChatService(Asking):
    """Owns the turns of all chats, from the question to the stored answer. Event loop only."""

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
        super().__init__(
            repository=repository,
            engine=engine,
            tokenizer=tokenizer,
            hub=hub,
            max_message_chars=max_message_chars,
        )
        self._hub = hub
        self._upkeep = upkeep

    # Running turns

    async def stop(self, turn_id: str) -> None:
        """Stop a turn; returns when the engine confirmed it and the answer so far is stored."""
        await self._runner.stop(turn_id)

    async def stop_all(self, chat_id: str) -> None:
        """Stop every turn of a chat, as `stop` does."""
        await self._runner.stop_all(chat_id)

    # Chats as a whole

    async def select(self, chat: Chat, message_id: str) -> None:
        """Show the branch of a message, down to its newest end, and go on from there.

        Raises NotFound, and TurnRunning unless it is one of the answers that run.
        """
        running = await self._repository.running_turns(chat.id)
        if running and message_id not in {turn.message_id for turn in running}:
            raise TurnRunning(chat.id)
        await self._repository.select_branch(chat.id, message_id)

    async def carry_over(self, chat: Chat) -> Chat:
        """A new chat with the same assistant, which begins with the last exchanges of this one.

        Raises TurnRunning.
        """
        with self._only_one(chat.id):
            await self._resting_path(chat)
            return await carry_over(self._repository, self._prompts, chat)

    async def move_to_latest(self, chat: Chat) -> bool:
        """Go on with the latest version of the chat's assistant; False when it has that.

        Raises TurnRunning, WrongModel, ContextOverflow, NoSuchPage.
        """
        with self._only_one(chat.id):
            path = await self._resting_path(chat)
            return await move_to_latest(self._repository, self._prompts, self._engine, chat, path)

    async def warm(self, chat: Chat) -> None:
        """Have the state of a chat that is being looked at brought back; a hint, never an error."""
        if self._hub.of_chat(chat.id) is not None:
            return
        with contextlib.suppress(EngineUnavailable, NotFound):
            prefix = await self._repository.prefix_by_id(chat.prefix_id)
            history_ids, computed = history_of(await self._repository.path(chat.id))
            if prefix.tokenizer_digest != self._prompts.tokenizer_digest:
                return
            await self._engine.warm(
                Warm(
                    chat_id=chat.id,
                    prefix_ids=prefix.token_ids,
                    history_ids=history_ids[:computed],
                    prefix_scope=chat.assistant_id,
                )
            )

    async def delete(self, user_id: str, chat_id: str) -> bool:
        """Stop what runs, delete the chat, then have the engine drop what it holds.

        False when there is no such chat of this user.
        """
        if await self._repository.chat(user_id, chat_id) is None:
            return False
        with self._only_one(chat_id):
            await self.stop_all(chat_id)
            deleted = await self._repository.delete_chat(user_id, chat_id)
        await self._upkeep.forget_deleted()
        return deleted

    async def close(self) -> None:
        """End every running turn as interrupted, with what it has."""
        await self.queued.close()
        await self._runner.close()

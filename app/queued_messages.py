"""The message that waits for the end of an answer: sent by the server, page open or not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from app.faults import Fault
from engine.errors import ContextOverflow, EngineUnavailable, QueueFull
from sessions.errors import NotFound, TurnRunning
from sessions.records import Chat, QueuedMessage
from sessions.repository import Repository

logger = logging.getLogger(__name__)

ENGINE_AWAY_S = 5.0
NOT_AFTER = {  # an answer that the question was not written for
    "interrupted": "It was not sent: the answer before it was interrupted.",
    "failed": "It was not sent: the answer before it failed.",
}


class QueuedMessages:
    """Owns the tasks that try again to send while the engine has no room. Event loop only."""

    def __init__(
        self,
        *,
        repository: Repository,
        send: Callable[[Chat, QueuedMessage], Awaitable[None]],
    ) -> None:
        self._repository = repository
        self._send = send
        self._later: dict[str, asyncio.Task[None]] = {}
        self._resuming: asyncio.Task[None] | None = None
        self._closing = False

    async def answer_ended(self, chat_id: str) -> None:
        """Send what waits for the end of this chat's answers, if that was a good one."""
        try:
            await self._advance(chat_id)
        except Exception:
            logger.exception("the queued message of chat %s could not be sent", chat_id)

    def begin(self) -> None:
        """After a start: send what the last end came before."""
        self._resuming = asyncio.create_task(self._resume(), name="queued messages")

    async def _resume(self) -> None:
        for chat_id in await self._repository.chats_with_queued():
            await self.answer_ended(chat_id)

    async def send_now(self, chat: Chat) -> None:
        """Send a message that waits for its user. Does nothing when there is none (any more).

        Raises TurnRunning, WrongModel, QueueFull, EngineUnavailable, ContextOverflow.
        """
        queued = await self._repository.queued_message(chat.id)
        if queued is not None:
            with contextlib.suppress(NotFound):
                await self._send(chat, queued)

    async def close(self) -> None:
        """Send nothing any more."""
        self._closing = True
        tasks = [*self._later.values(), *([self._resuming] if self._resuming else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _advance(self, chat_id: str) -> None:
        queued = await self._repository.queued_message(chat_id)
        if queued is None or queued.problem is not None:
            return
        chat = await self._repository.chat_by_id(chat_id)
        if chat is None or await self._repository.running_turns(chat_id):
            return
        [*_, last] = await self._repository.path(chat_id)
        if last.status in NOT_AFTER:
            await self._repository.set_queue_problem(chat_id, NOT_AFTER[last.status])
        elif not self._closing:
            await self._try(chat, queued)

    async def _try(self, chat: Chat, queued: QueuedMessage) -> None:
        try:
            await self._send(chat, queued)
        except (NotFound, TurnRunning):
            pass  # withdrawn, or somebody was faster: the end of that turn comes here again
        except QueueFull as error:
            self._try_later(chat.id, error.retry_after_s)
        except EngineUnavailable:
            self._try_later(chat.id, ENGINE_AWAY_S)
        except ContextOverflow as error:
            problem = (
                f"It was not sent: it brings the chat to {error.num_tokens:,} tokens; "
                f"the model's context holds {error.limit:,}, the answer included."
            )
            await self._repository.set_queue_problem(chat.id, problem)
        except Fault as error:
            await self._repository.set_queue_problem(chat.id, f"It was not sent: {error}")

    def _try_later(self, chat_id: str, delay_s: float) -> None:
        async def later() -> None:
            await asyncio.sleep(delay_s)
            del self._later[chat_id]
            await self.answer_ended(chat_id)

        if chat_id not in self._later and not self._closing:
            self._later[chat_id] = asyncio.create_task(later(), name=f"queued message {chat_id}")

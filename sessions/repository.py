"""All that the application reads and writes durably, one method per question or transaction."""

from __future__ import annotations

from collections.abc import Sequence

from sessions.account_repository import AccountRepository
from sessions.answer_repository import AnswerRepository
from sessions.api_repository import ApiRepository
from sessions.assistant_repository import AssistantRepository
from sessions.history_repository import HistoryRepository
from sessions.latency_repository import LatencyRepository
from sessions.queries import assistants, chats, settings
from sessions.records import (
    Assistant,
    AssistantSeed,
    AssistantVersion,
    Chat,
    ChatCursor,
    ChatSummary,
    Message,
    Prefix,
)
from sessions.turn_repository import TurnRepository


class Repository(
    TurnRepository,
    HistoryRepository,
    ApiRepository,
    AccountRepository,
    AssistantRepository,
    AnswerRepository,
    LatencyRepository,
):
    """Owns nothing but the way into `database`; called from the event loop that opened it.

    Every method that writes returns after its transaction is durable. A caller that is cancelled
    while it waits does not take its transaction back.
    """

    @property
    def trouble(self) -> str:
        """Why the database does not take what is to be stored, in a few words; "" when it does."""
        return self._database.trouble

    # Settings of the server

    async def get_setting(self, key: str) -> str | None:
        async with self._database.read() as db:
            return await settings.get_setting(db, key)

    async def set_setting(self, key: str, value: str) -> None:
        await self._database.write(lambda db: settings.set_setting(db, key, value))

    async def ensure_setting(self, key: str, value: str) -> str:
        """Store `value` unless the key has one already; returns the one that is stored."""
        return await self._database.write(lambda db: settings.ensure_setting(db, key, value))

    # Assistants

    async def sync_builtin_assistants(self, seeds: Sequence[AssistantSeed]) -> None:
        """Bring the built-in assistants to what is shipped; the first one is the default.

        A changed prompt makes a new version; a built-in that is no longer shipped is withdrawn,
        its chats stay. Calling it again changes nothing.
        """
        now = self._clock.now()
        await self._database.write(lambda db: assistants.sync_builtin(db, seeds, now))

    async def assistants(self, user_id: str | None) -> list[Assistant]:
        """Published ones and the user's own, the default first."""
        async with self._database.read() as db:
            return await assistants.visible(db, user_id)

    async def assistant_version(self, assistant_id: str) -> AssistantVersion:
        """The current version. Raises NotFound."""
        async with self._database.read() as db:
            return await assistants.current_version(db, assistant_id)

    async def prefix(
        self, version_id: str, tokenizer_digest: str, token_ids: Sequence[int]
    ) -> Prefix:
        """The prefix of this version under this tokenizer; made from `token_ids` the first time.

        Raises NotFound when there is no such version.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: assistants.ensure_prefix(db, version_id, tokenizer_digest, token_ids, now)
        )

    async def prefix_by_id(self, prefix_id: str) -> Prefix:
        """Raises NotFound."""
        async with self._database.read() as db:
            return await assistants.prefix_by_id(db, prefix_id)

    # Chats and their messages

    async def chats(
        self, user_id: str, *, limit: int = 50, after: ChatCursor | None = None
    ) -> list[ChatSummary]:
        """A user's chats, pinned ones first, then the latest; those `after` the last one known."""
        async with self._database.read() as db:
            return await chats.summaries(db, user_id, limit, after)

    async def chat(self, user_id: str, chat_id: str) -> Chat | None:
        """None when there is no such chat or it is another user's."""
        async with self._database.read() as db:
            return await chats.owned(db, user_id, chat_id)

    async def chat_of_message(self, user_id: str, message_id: str) -> str | None:
        """The id of a message's chat; None when that is not this user's."""
        async with self._database.read() as db:
            return await chats.chat_of_message(db, user_id, message_id)

    async def create_chat(self, user_id: str, prefix_id: str, title: str) -> Chat:
        """An empty chat. Raises NotFound when there is no such user or prefix."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: chats.create(db, user_id, prefix_id, title, now)
        )

    async def rename_chat(self, user_id: str, chat_id: str, title: str) -> bool:
        """False when there is no such chat of this user."""
        return await self._database.write(lambda db: chats.rename(db, user_id, chat_id, title))

    async def chats_to_forget(self) -> list[str]:
        """Deleted chats whose checkpoints may still be on disk, those of earlier runs included."""
        async with self._database.read() as db:
            return await chats.to_forget(db)

    async def chats_forgotten(self, chat_ids: Sequence[str]) -> None:
        """The engine confirmed that it holds nothing of these chats any more."""
        await self._database.write(lambda db: chats.forgotten(db, chat_ids))

    async def path(self, chat_id: str, leaf_id: str | None = None) -> list[Message]:
        """Messages from the root to `leaf_id`, by default to the chat's active leaf.

        Empty for a chat without messages. Raises NotFound when there is no such chat or leaf.
        """
        async with self._database.read() as db:
            return await chats.path(db, chat_id, leaf_id)

    async def message(self, chat_id: str, message_id: str) -> Message | None:
        """None when there is no such message in this chat."""
        async with self._database.read() as db:
            return await chats.message(db, chat_id, message_id)

    async def siblings(self, chat_id: str, message_ids: Sequence[str]) -> dict[str, list[str]]:
        """For each message the ids of all branches at its place, itself included, oldest first."""
        async with self._database.read() as db:
            return await chats.siblings(db, chat_id, message_ids)

    async def select_branch(self, chat_id: str, message_id: str) -> str:
        """Make the newest leaf below a message the active one; returns it. Raises NotFound."""
        return await self._database.write(lambda db: chats.select_branch(db, chat_id, message_id))

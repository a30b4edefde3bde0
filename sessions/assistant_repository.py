"""The part of the repository that is about people's assistants, and about who uses how much."""

from __future__ import annotations

from collections.abc import Sequence

from sessions.assistant_records import (
    AssistantDetail,
    AssistantDocument,
    AssistantDraft,
    AssistantUse,
    ChatUse,
    Totals,
    UserUse,
    VersionUse,
)
from sessions.clock import Clock
from sessions.database import Database
from sessions.queries import assistants, people_assistants, usage
from sessions.records import AssistantVersion


class AssistantRepository:
    """Base of `Repository`, which sets the attributes."""

    _database: Database
    _clock: Clock

    # Assistants

    async def assistant(self, user_id: str | None, assistant_id: str) -> AssistantDetail | None:
        """A published one or the user's own; None when this user sees no such assistant."""
        async with self._database.read() as db:
            return await people_assistants.detail(db, user_id, assistant_id)

    async def own_assistants(self, user_id: str) -> int:
        """How many the user has, published ones included."""
        async with self._database.read() as db:
            return await people_assistants.count_owned(db, user_id)

    async def create_assistant(self, owner_id: str, draft: AssistantDraft) -> str:
        """A private assistant at version 1; returns its id."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: people_assistants.create(db, owner_id, draft, now)
        )

    async def save_assistant(self, assistant_id: str, revision: int, draft: AssistantDraft) -> int:
        """Change an assistant that was looked at at this revision; its current version's number.

        Prompt or documents that differ make a new version, for new chats; the rest applies at once.
        Raises AssistantChanged when it was changed meanwhile; NotFound when it is gone or built in.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: people_assistants.save(db, assistant_id, revision, draft, now)
        )

    async def publish_assistant(self, assistant_id: str, published: bool) -> bool:
        """Show it to all users, or to its owner only; False when it is gone or built in."""
        return await self._database.write(
            lambda db: people_assistants.set_published(db, assistant_id, published)
        )

    async def delete_assistant(self, assistant_id: str) -> bool:
        """Take it out of every list; its chats go on. False when it is gone or built in."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: people_assistants.delete(db, assistant_id, now)
        )

    async def version(self, version_id: str) -> AssistantVersion:
        """Raises NotFound."""
        async with self._database.read() as db:
            return await assistants.version_by_id(db, version_id)

    async def version_documents(self, version_id: str) -> list[AssistantDocument]:
        """In their order; none for an unknown version."""
        async with self._database.read() as db:
            return await people_assistants.documents(db, version_id)

    async def version_uses(self, assistant_id: str) -> list[VersionUse]:
        """Chats by version, the latest version first; without versions that have none."""
        async with self._database.read() as db:
            return await people_assistants.version_uses(db, assistant_id)

    async def assistant_sampling(self, assistant_id: str) -> dict[str, object]:
        """The defaults that an assistant sets, whether or not it can still be chosen."""
        async with self._database.read() as db:
            return await people_assistants.sampling_of(db, assistant_id)

    async def move_chat(self, user_id: str, chat_id: str, prefix_id: str) -> bool:
        """Put another prefix before a chat's messages, which stay as they are.

        False when there is no such chat of this user. Raises TurnRunning.
        """
        return await self._database.write(
            lambda db: people_assistants.move_chat(db, user_id, chat_id, prefix_id)
        )

    # Use

    async def totals(self) -> Totals:
        async with self._database.read() as db:
            return await usage.totals(db)

    async def user_uses(self, *, limit: int) -> list[UserUse]:
        """The users seen last."""
        async with self._database.read() as db:
            return await usage.users(db, limit)

    async def largest_chats(self, *, limit: int) -> list[ChatUse]:
        """The chats with the most bytes of messages, in any order."""
        async with self._database.read() as db:
            return await usage.largest_chats(db, limit)

    async def chat_uses(self, chat_ids: Sequence[str]) -> list[ChatUse]:
        """These chats, in any order, without those that are gone."""
        async with self._database.read() as db:
            return await usage.chats(db, chat_ids)

    async def chat_owners(self, chat_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        """By chat its user's and its assistant's id, without those that are gone."""
        async with self._database.read() as db:
            return await usage.owners(db, chat_ids)

    async def kept_state_chats(self) -> set[str]:
        """The engine's chats that stateless calls of the API may go on from."""
        async with self._database.read() as db:
            return await usage.kept_state_chats(db)

    async def assistant_uses(self) -> list[AssistantUse]:
        """All assistants, deleted ones that still have chats included."""
        async with self._database.read() as db:
            return await usage.assistants(db)

    async def prefill_rate(self) -> tuple[int, int, float]:
        """Of the latest turns that read a prompt: how many, tokens read, milliseconds of that."""
        async with self._database.read() as db:
            return await usage.prefill_rate(db)

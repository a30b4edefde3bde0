"""The part of the repository that is about chats as a whole: the list, search, coming and going."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from functools import partial

from sessions.clock import Clock
from sessions.database import Database
from sessions.history_records import ExportedChat, Imported, NewChat, SearchHit
from sessions.queries import chats, export, imports, purge, search
from sessions.records import DeletedChat


class HistoryRepository:
    """Base of `Repository`, which sets the attributes."""

    _database: Database
    _clock: Clock

    # The list

    async def pin_chat(self, user_id: str, chat_id: str, pinned: bool) -> bool:
        """False when there is no such chat of this user."""
        return await self._database.write(lambda db: chats.pin(db, user_id, chat_id, pinned))

    async def delete_chat(self, user_id: str, chat_id: str) -> bool:
        """Put a chat out of sight at once; `restore_chat` brings it back until it is purged.

        False when there is no such chat of this user.
        """
        now = self._clock.now()
        return await self._database.write(lambda db: chats.delete(db, user_id, chat_id, now))

    async def restore_chat(self, user_id: str, chat_id: str) -> bool:
        """False when there is no such deleted chat of this user: it may be purged."""
        return await self._database.write(lambda db: chats.restore(db, user_id, chat_id))

    async def deleted_chats(self, user_id: str) -> list[DeletedChat]:
        """Those that can be brought back, the latest first."""
        async with self._database.read() as db:
            return await chats.deleted(db, user_id)

    # Purging

    async def purge_deleted(self, deleted_before: datetime) -> int:
        """Purge chats deleted before then: their rows, and their text from free pages and WAL.

        A turn that runs is deleted with its chat, so cancel that first. Returns how many went;
        their ids are kept in `chats_to_forget`. Their words stay in the search indices' segments
        until `merge_search` has run.
        """
        async with self._database.read() as db:
            due = await purge.due(db, deleted_before)
        purged = 0
        for chat_id in due:
            purged += await self._database.write(partial(purge.chat, chat_id), truncate_wal=True)
        return purged

    async def merge_search(self, *, pause_s: float = 0.02) -> None:
        """Rewrite the search indices without what was purged, if anything was.

        Many short transactions with pauses between them; one that is cut off is begun again by
        the next call, after a restart too.
        """
        async with self._database.read() as db:
            if not await purge.merge_due(db):
                return
        first = True
        while await self._database.write(partial(purge.merge_step, first=first)):
            first = False
            await asyncio.sleep(pause_s)
        await self._database.write(purge.merged, truncate_wal=True)

    # Search

    async def search_titles(
        self, user_id: str, terms: Sequence[str], *, limit: int = 20
    ) -> list[SearchHit]:
        """The user's chats whose title holds all terms, the latest first."""
        async with self._database.read() as db:
            return await search.titles(db, user_id, terms, limit)

    async def search_messages(
        self, user_id: str, terms: Sequence[str], *, limit: int = 100, before: int | None = None
    ) -> list[SearchHit]:
        """The user's messages that hold all terms, on any branch, the latest first.

        Running answers are found when they have ended. `before` is the place of the last one
        known.
        """
        async with self._database.read() as db:
            return await search.messages(db, user_id, terms, limit, before)

    # Export and import

    async def chat_ids(self, user_id: str) -> list[str]:
        """All of a user's chats, the oldest first."""
        async with self._database.read() as db:
            return await export.chat_ids(db, user_id)

    async def exported_chat(self, user_id: str, chat_id: str) -> ExportedChat | None:
        """None when there is no such chat of this user."""
        async with self._database.read() as db:
            return await export.chat(db, user_id, chat_id)

    async def import_chat(self, user_id: str, prefix_id: str, chat: NewChat) -> Imported:
        """Store a chat from elsewhere unless the user has it. Raises NotFound (prefix)."""
        return await self._database.write(lambda db: imports.add(db, user_id, prefix_id, chat))

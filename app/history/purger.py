"""What was deleted goes for good once it can no longer be undone, and old backups with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sessions.migrate import expire_backups
from sessions.repository import Repository

logger = logging.getLogger(__name__)

UNDO = timedelta(seconds=30)
LOOK_EVERY_S = 1.0
BACKUPS_EVERY_S = 24 * 3600.0


class Purger:
    """Owns one background task; `forget` has the engine drop deleted chats. Event loop only.

    When a chat is due is in the database alone, so a restart delays a purge and loses none.
    """

    def __init__(
        self,
        *,
        repository: Repository,
        forget: Callable[[], Awaitable[None]],
        backup_dir: Path,
        undo: timedelta = UNDO,
    ) -> None:
        self._repository = repository
        self._forget = forget
        self._backup_dir = backup_dir
        self._undo = undo
        self._merge_due = True  # an earlier run may have been cut off
        self._backups_due = time.monotonic() + BACKUPS_EVERY_S  # the start has seen to them
        self._task = asyncio.create_task(self._run(), name="purger")

    async def purge(self) -> None:
        """Purge what is due: rows, then the engine's state, then what the search still holds."""
        if await self._repository.purge_deleted(datetime.now(UTC) - self._undo):
            self._merge_due = True
            await self._forget()
        if self._merge_due:
            await self._repository.merge_search()
            self._merge_due = False

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.purge()
                if time.monotonic() >= self._backups_due:
                    self._backups_due = time.monotonic() + BACKUPS_EVERY_S
                    await asyncio.to_thread(expire_backups, self._backup_dir)
            except Exception:
                # The next round tries again; a full disk must not end the rounds.
                logger.exception("deleted chats could not be purged")

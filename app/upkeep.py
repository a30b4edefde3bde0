"""What happens beside the turns: their progress is saved, deleted chats leave the engine."""

from __future__ import annotations

import asyncio
import logging

from app.streams import TurnHub
from engine.client import Engine
from engine.errors import EngineUnavailable
from sessions.records import Progress
from sessions.repository import Repository

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 1.0


class Upkeep:
    """Owns one background task. Event loop only."""

    def __init__(self, *, repository: Repository, engine: Engine, hub: TurnHub) -> None:
        self._repository = repository
        self._engine = engine
        self._hub = hub
        self._forget_due = True  # deleted chats of an earlier run may still have checkpoints
        self._task = asyncio.create_task(self._run(), name="upkeep")

    async def forget_deleted(self) -> None:
        """Have the engine drop what it holds of deleted chats; later, when it is away now."""
        self._forget_due = True
        due = await self._repository.chats_to_forget()
        if due:
            try:
                await self._engine.forget(due)
            except EngineUnavailable:
                logger.warning("the engine is away; the state of %d chats goes later", len(due))
                return
            await self._repository.chats_forgotten(due)
        self._forget_due = False

    async def save_progress(self) -> None:
        """Store what running answers gained, all in one transaction."""
        grown = [one for one in self._hub.running() if len(one.token_ids) > one.saved_tokens]
        if not grown:
            return
        progress = [
            Progress(message_id=one.message_id, text=one.text, token_ids=list(one.token_ids))
            for one in grown
        ]
        await self._repository.save_progress(progress)
        for live, saved in zip(grown, progress, strict=True):
            live.saved_tokens = len(saved.token_ids)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            try:
                await self.save_progress()
                if self._forget_due and self._engine.alive:
                    await self.forget_deleted()
            except Exception:
                # The next round tries again; a full disk must not end the rounds.
                logger.exception("the progress of running answers could not be saved")

"""What running answers of kept chats have so far is stored, so that a crash loses little of it."""

from __future__ import annotations

import asyncio
import logging

from app.api.generation import Generations
from sessions.records import Progress
from sessions.repository import Repository

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 1.0


class KeptProgress:
    """Owns one background task, from `begin` to `close`. Event loop only."""

    def __init__(self, repository: Repository, generations: Generations) -> None:
        self._repository = repository
        self._generations = generations
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name="api progress")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def save(self) -> None:
        """Store what running answers gained, all in one transaction."""
        grown = []
        for one in self._generations.running():
            [answer, *_] = one.answers
            if one.message_id is not None and len(answer.token_ids) > one.saved_tokens:
                grown.append((one, answer))
        if not grown:
            return
        progress = [
            Progress(
                message_id=one.message_id or "",
                text=answer.text,
                token_ids=list(answer.token_ids),
            )
            for one, answer in grown
        ]
        await self._repository.save_progress(progress)
        for (one, _), saved in zip(grown, progress, strict=True):
            one.saved_tokens = len(saved.token_ids)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            try:
                await self.save()
            except Exception:
                logger.exception("the progress of the API's answers could not be saved")

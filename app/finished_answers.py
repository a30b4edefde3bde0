"""The HTML of answers that have ended: rendered once, and kept beside them in the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from app.rendering import FinishedHtml, key_of
from sessions.answer_records import Rendered
from sessions.records import Message
from sessions.repository import Repository

logger = logging.getLogger(__name__)


class FinishedAnswers:
    """Owns the HTML in memory and what of it is still to be stored. Event loop only."""

    def __init__(self, repository: Repository) -> None:
        self.cache = FinishedHtml()
        self._repository = repository
        self._saving: set[asyncio.Task[None]] = set()

    async def html(self, messages: Sequence[Message]) -> dict[str, str]:
        """The HTML of each of these answers that has ended, by its id; the new ones are kept."""
        ended = [one for one in messages if one.role == "assistant" and one.status != "running"]
        keys = {one.id: key_of(one.text) for one in ended}
        missing = [key for key in keys if keys[key] not in self.cache]
        for row in await self._repository.rendered_answers(missing):
            if row.key == keys[row.message_id]:
                self.cache.put(row.key, row.html)
        html: dict[str, str] = {}
        new: list[Rendered] = []
        for one in ended:
            key = keys[one.id]
            known = key in self.cache
            html[one.id] = self.cache.html(one.text)
            if not known:
                new.append(Rendered(message_id=one.id, key=key, html=html[one.id]))
                await asyncio.sleep(0)  # many at once take a while
        if new:
            task = asyncio.create_task(self._save(new), name="rendered answers")
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)
        return html

    async def close(self) -> None:
        """Wait until what was rendered is stored."""
        await asyncio.gather(*self._saving)

    async def _save(self, new: Sequence[Rendered]) -> None:
        try:
            await self._repository.keep_rendered(new)
        except Exception:
            logger.exception("the HTML of %d answers could not be kept", len(new))

"""The HTML of answers, kept beside them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.answer_records import Rendered

AT_ONCE = 500  # ids in one statement


async def rendered(db: AsyncConnection, message_ids: Sequence[str]) -> list[Rendered]:
    table = models.RenderedAnswer
    found: list[Rendered] = []
    for start in range(0, len(message_ids), AT_ONCE):
        some = message_ids[start : start + AT_ONCE]
        rows = await db.execute(select(table.__table__).where(table.message_id.in_(some)))
        found += [Rendered(**row) for row in rows.mappings()]
    return found


async def keep_rendered(db: AsyncConnection, answers: Sequence[Rendered]) -> None:
    message, table = models.Message, models.RenderedAnswer
    for one in answers:
        if await db.scalar(select(message.id).where(message.id == one.message_id)) is None:
            continue  # purged meanwhile
        values = {"key": one.key, "html": one.html}
        await db.execute(
            upsert(table)
            .values(message_id=one.message_id, **values)
            .on_conflict_do_update(index_elements=[table.message_id], set_=values)
        )

"""The real end of deleted chats: their rows, then what the search indices still hold of them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.queries import people_assistants, settings

MERGE_PAGES = 200  # written in one step; such a step takes about 25 ms
_MERGE_DUE = "search_merge_due"


async def due(db: AsyncConnection, deleted_before: datetime) -> list[str]:
    return list(
        await db.scalars(
            select(models.Chat.id)
            .where(models.Chat.deleted_at.is_not(None), models.Chat.deleted_at <= deleted_before)
            .order_by(models.Chat.deleted_at)
        )
    )


async def chat(chat_id: str, db: AsyncConnection) -> bool:
    """Deletes from the leaves of the schema up: cascades would recurse along a chat's length.

    False when there is no such deleted chat: its deletion was undone meanwhile.
    """
    done = await db.execute(
        update(models.Chat)
        .where(models.Chat.id == chat_id, models.Chat.deleted_at.is_not(None))
        .values(active_leaf_id=None)
    )
    if done.rowcount == 0:
        return False
    version, assistant = models.AssistantVersion, models.Assistant
    deleted_assistant = await db.scalar(
        select(assistant.id)
        .join(version, version.assistant_id == assistant.id)
        .join(models.Prefix, models.Prefix.assistant_version_id == version.id)
        .join(models.Chat, models.Chat.prefix_id == models.Prefix.id)
        .where(models.Chat.id == chat_id, assistant.deleted_at.is_not(None))
    )
    turn_ids = select(models.Turn.id).where(models.Turn.chat_id == chat_id)
    await db.execute(delete(models.TurnLatency).where(models.TurnLatency.turn_id.in_(turn_ids)))
    await db.execute(delete(models.Turn).where(models.Turn.chat_id == chat_id))
    await db.execute(delete(models.PathMark).where(models.PathMark.chat_id == chat_id))
    message_ids = select(models.Message.id).where(models.Message.chat_id == chat_id)
    rendered = models.RenderedAnswer
    await db.execute(delete(rendered).where(rendered.message_id.in_(message_ids)))
    await db.execute(delete(models.Message).where(models.Message.chat_id == chat_id))
    await db.execute(delete(models.Chat).where(models.Chat.id == chat_id))
    if deleted_assistant is not None:
        await people_assistants.drop_unused(db, deleted_assistant)
    await db.execute(insert(models.ChatToForget).values(chat_id=chat_id))
    await settings.set_setting(db, _MERGE_DUE, "1")
    return True


async def merge_due(db: AsyncConnection) -> bool:
    return await settings.get_setting(db, _MERGE_DUE) == "1"


async def merged(db: AsyncConnection) -> None:
    await settings.set_setting(db, _MERGE_DUE, "0")


async def merge_step(db: AsyncConnection, *, first: bool) -> bool:
    """Merge some of the indices' segments, which drops what was removed; False when all are one.

    The first step begins to merge everything, later ones go on with that.
    """
    before = await _total_changes(db)
    for name in ("title", "message"):
        await db.exec_driver_sql(
            f"INSERT INTO {name}_search ({name}_search, rank) VALUES ('merge', ?)",
            (-MERGE_PAGES if first else MERGE_PAGES,),
        )
    # A command that finds nothing to merge counts as one change or none.
    return await _total_changes(db) - before > 2


async def _total_changes(db: AsyncConnection) -> int:
    return int((await db.exec_driver_sql("SELECT total_changes()")).scalar_one())

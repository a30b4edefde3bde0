"""Assistants that people write: made, changed, published, deleted; and chats moved along."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete as delete_rows
from sqlalchemy import exists, false, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.assistant_records import (
    AssistantDetail,
    AssistantDocument,
    AssistantDraft,
    VersionUse,
)
from sessions.errors import AssistantChanged, NotFound, TurnRunning
from sessions.queries import assistants
from sessions.queries.ids import new_id

AFTER_BUILTIN = 1000  # in the order of the list


async def create(db: AsyncConnection, owner_id: str, draft: AssistantDraft, now: datetime) -> str:
    assistant_id = new_id()
    await db.execute(
        insert(models.Assistant).values(
            id=assistant_id,
            owner_id=owner_id,
            name=draft.name,
            description=draft.description,
            greeting=draft.greeting,
            sampling=dict(draft.sampling),
            published=False,
            position=AFTER_BUILTIN,
            created_at=now,
        )
    )
    await _add_version(db, assistant_id, 1, draft, now)
    return assistant_id


async def save(
    db: AsyncConnection, assistant_id: str, revision: int, draft: AssistantDraft, now: datetime
) -> int:
    """The number of the current version afterwards: a new one if prompt or documents changed."""
    table = models.Assistant
    done = await db.execute(
        update(table)
        .where(table.id == assistant_id, table.revision == revision, table.deleted_at.is_(None))
        .where(table.slug.is_(None))
        .values(
            name=draft.name,
            description=draft.description,
            greeting=draft.greeting,
            sampling=dict(draft.sampling),
            revision=revision + 1,
        )
    )
    if done.rowcount == 0:
        found = await db.scalar(
            select(table.revision).where(table.id == assistant_id, table.deleted_at.is_(None))
        )
        if found is None or found == revision:
            raise NotFound("assistant", assistant_id)
        raise AssistantChanged(assistant_id, found)
    version = await assistants.current_version(db, assistant_id)
    known = (version.system_prompt, await documents(db, version.id))
    if known == (draft.system_prompt, list(draft.documents)):
        return version.number
    await _add_version(db, assistant_id, version.number + 1, draft, now)
    return version.number + 1


async def set_published(db: AsyncConnection, assistant_id: str, published: bool) -> bool:
    table = models.Assistant
    done = await db.execute(
        update(table)
        .where(table.id == assistant_id, table.slug.is_(None), table.deleted_at.is_(None))
        .values(published=published, revision=table.revision + 1)
    )
    return done.rowcount > 0


async def delete(db: AsyncConnection, assistant_id: str, now: datetime) -> bool:
    """Out of every list; versions that no chat was begun with lose their texts."""
    table = models.Assistant
    done = await db.execute(
        update(table)
        .where(table.id == assistant_id, table.slug.is_(None), table.deleted_at.is_(None))
        .values(published=False, deleted_at=now, revision=table.revision + 1)
    )
    if done.rowcount == 0:
        return False
    await drop_unused(db, assistant_id)
    return True


async def drop_unused(db: AsyncConnection, assistant_id: str) -> None:
    """Remove the texts of a deleted assistant's versions that no chat has, and at last its row."""
    table, version = models.Assistant, models.AssistantVersion
    used = exists().where(
        models.Prefix.assistant_version_id == version.id,
        models.Chat.prefix_id == models.Prefix.id,
    )
    unused = select(version.id).where(version.assistant_id == assistant_id, ~used)
    ids = list(await db.scalars(unused))
    for owned in (models.AssistantDocument, models.Prefix):
        await db.execute(delete_rows(owned).where(owned.assistant_version_id.in_(ids)))
    await db.execute(delete_rows(version).where(version.id.in_(ids)))
    if await db.scalar(select(exists().where(version.assistant_id == assistant_id))) is False:
        await db.execute(delete_rows(table).where(table.id == assistant_id))


async def detail(
    db: AsyncConnection, user_id: str | None, assistant_id: str
) -> AssistantDetail | None:
    """None when there is none that this user sees."""
    table = models.Assistant
    own = false() if user_id is None else table.owner_id == user_id
    row = (
        (
            await db.execute(
                select(
                    table.id,
                    table.slug,
                    table.owner_id,
                    table.name,
                    table.description,
                    table.greeting,
                    table.published,
                    table.sampling,
                    table.revision,
                    table.created_at,
                )
                .where(table.id == assistant_id, table.deleted_at.is_(None))
                .where(or_(table.published, own))
            )
        )
        .mappings()
        .one_or_none()
    )
    if row is None:
        return None
    version = await assistants.current_version(db, assistant_id)
    return AssistantDetail(**row, version=version, documents=await documents(db, version.id))


async def count_owned(db: AsyncConnection, owner_id: str) -> int:
    table = models.Assistant
    count = await db.scalar(
        select(func.count()).where(table.owner_id == owner_id, table.deleted_at.is_(None))
    )
    return count or 0


async def documents(db: AsyncConnection, version_id: str) -> list[AssistantDocument]:
    table = models.AssistantDocument
    rows = await db.execute(
        select(table.name, table.text)
        .where(table.assistant_version_id == version_id)
        .order_by(table.position)
    )
    return [AssistantDocument(name=name, text=text) for name, text in rows]


async def version_uses(db: AsyncConnection, assistant_id: str) -> list[VersionUse]:
    version, prefix, chat = models.AssistantVersion, models.Prefix, models.Chat
    rows = await db.execute(
        select(version.number, func.count(chat.id))
        .join(prefix, prefix.assistant_version_id == version.id)
        .join(chat, chat.prefix_id == prefix.id)
        .where(version.assistant_id == assistant_id, chat.deleted_at.is_(None))
        .group_by(version.number)
        .order_by(version.number.desc())
    )
    return [VersionUse(number=number, chats=count) for number, count in rows]


async def sampling_of(db: AsyncConnection, assistant_id: str) -> dict[str, object]:
    found = await db.scalar(
        select(models.Assistant.sampling).where(models.Assistant.id == assistant_id)
    )
    return dict(found or {})


async def move_chat(db: AsyncConnection, user_id: str, chat_id: str, prefix_id: str) -> bool:
    """False when there is no such chat of this user. Raises TurnRunning."""
    chat = models.Chat
    found = (
        await db.execute(
            select(chat.running_group_id).where(
                chat.id == chat_id, chat.user_id == user_id, chat.deleted_at.is_(None)
            )
        )
    ).one_or_none()
    if found is None:
        return False
    running = exists().where(models.Turn.chat_id == chat_id, models.Turn.running.is_not(None))
    if await db.scalar(select(running)):
        raise TurnRunning(chat_id)
    await db.execute(update(chat).where(chat.id == chat_id).values(prefix_id=prefix_id))
    return True


async def _add_version(
    db: AsyncConnection, assistant_id: str, number: int, draft: AssistantDraft, now: datetime
) -> None:
    version_id = new_id()
    await db.execute(
        insert(models.AssistantVersion).values(
            id=version_id,
            assistant_id=assistant_id,
            number=number,
            system_prompt=draft.system_prompt,
            created_at=now,
        )
    )
    await _add_documents(db, version_id, draft.documents)


async def _add_documents(
    db: AsyncConnection, version_id: str, texts: Sequence[AssistantDocument]
) -> None:
    if texts:
        await db.execute(
            insert(models.AssistantDocument),
            [
                {
                    "id": new_id(),
                    "assistant_version_id": version_id,
                    "position": position,
                    "name": one.name,
                    "text": one.text,
                }
                for position, one in enumerate(texts)
            ],
        )

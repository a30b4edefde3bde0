"""Assistants, the versions of their system prompts, and the prefixes made of those."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import false, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import NotFound
from sessions.queries.ids import new_id
from sessions.records import Assistant, AssistantSeed, AssistantVersion, Prefix

_VERSION_COLUMNS = (
    models.AssistantVersion.id,
    models.AssistantVersion.assistant_id,
    models.AssistantVersion.number,
    models.AssistantVersion.system_prompt,
    models.AssistantVersion.created_at,
)
_PREFIX_COLUMNS = (
    models.Prefix.id,
    models.Prefix.assistant_version_id,
    models.Prefix.tokenizer_digest,
    models.Prefix.token_ids,
)


async def sync_builtin(db: AsyncConnection, seeds: Sequence[AssistantSeed], now: datetime) -> None:
    known = {
        row.slug: row
        for row in await db.execute(
            select(models.Assistant.__table__).where(models.Assistant.slug.is_not(None))
        )
    }
    for position, seed in enumerate(seeds):
        values: dict[str, Any] = {
            "name": seed.name,
            "description": seed.description,
            "greeting": seed.greeting,
            "sampling": dict(seed.sampling),
            "published": True,
            "position": position,
        }
        row = known.pop(seed.slug, None)
        if row is None:
            assistant_id = new_id()
            await db.execute(
                insert(models.Assistant).values(
                    id=assistant_id, slug=seed.slug, created_at=now, **values
                )
            )
            await _add_version(db, assistant_id, 1, seed.system_prompt, now)
            continue
        if any(row._mapping[name] != value for name, value in values.items()):
            await db.execute(
                update(models.Assistant).where(models.Assistant.id == row.id).values(values)
            )
        version = await current_version(db, row.id)
        if version.system_prompt != seed.system_prompt:
            await _add_version(db, row.id, version.number + 1, seed.system_prompt, now)
    withdrawn = [row.id for row in known.values() if row.published]
    if withdrawn:
        await db.execute(
            update(models.Assistant)
            .where(models.Assistant.id.in_(withdrawn))
            .values(published=False)
        )


async def visible(db: AsyncConnection, user_id: str | None) -> list[Assistant]:
    table = models.Assistant
    # Not `owner_id == None`: that is true of all that belong to nobody.
    own = false() if user_id is None else table.owner_id == user_id
    rows = await db.execute(
        select(
            table.id,
            table.slug,
            table.name,
            table.description,
            table.greeting,
            table.published,
            table.sampling,
            table.created_at,
        )
        .where(or_(table.published, own), table.deleted_at.is_(None))
        .order_by(table.position, table.created_at, table.id)
    )
    return [Assistant(**row) for row in rows.mappings()]


async def current_version(db: AsyncConnection, assistant_id: str) -> AssistantVersion:
    row = (
        (
            await db.execute(
                select(*_VERSION_COLUMNS)
                .where(models.AssistantVersion.assistant_id == assistant_id)
                .order_by(models.AssistantVersion.number.desc())
                .limit(1)
            )
        )
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise NotFound("assistant", assistant_id)
    return AssistantVersion(**row)


async def version_by_id(db: AsyncConnection, version_id: str) -> AssistantVersion:
    query = select(*_VERSION_COLUMNS).where(models.AssistantVersion.id == version_id)
    row = (await db.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFound("assistant version", version_id)
    return AssistantVersion(**row)


async def ensure_prefix(
    db: AsyncConnection,
    version_id: str,
    tokenizer_digest: str,
    token_ids: Sequence[int],
    now: datetime,
) -> Prefix:
    row = (
        (
            await db.execute(
                select(*_PREFIX_COLUMNS).where(
                    models.Prefix.assistant_version_id == version_id,
                    models.Prefix.tokenizer_digest == tokenizer_digest,
                )
            )
        )
        .mappings()
        .one_or_none()
    )
    if row is not None:
        return Prefix(**row)
    version = await db.scalar(
        select(models.AssistantVersion.id).where(models.AssistantVersion.id == version_id)
    )
    if version is None:
        raise NotFound("assistant version", version_id)
    prefix = Prefix(
        id=new_id(),
        assistant_version_id=version_id,
        tokenizer_digest=tokenizer_digest,
        token_ids=list(token_ids),
    )
    await db.execute(
        insert(models.Prefix).values(
            id=prefix.id,
            assistant_version_id=version_id,
            tokenizer_digest=tokenizer_digest,
            token_ids=prefix.token_ids,
            created_at=now,
        )
    )
    return prefix


async def prefix_by_id(db: AsyncConnection, prefix_id: str) -> Prefix:
    row = (
        (await db.execute(select(*_PREFIX_COLUMNS).where(models.Prefix.id == prefix_id)))
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise NotFound("prefix", prefix_id)
    return Prefix(**row)


async def _add_version(
    db: AsyncConnection, assistant_id: str, number: int, system_prompt: str, now: datetime
) -> None:
    await db.execute(
        insert(models.AssistantVersion).values(
            id=new_id(),
            assistant_id=assistant_id,
            number=number,
            system_prompt=system_prompt,
            created_at=now,
        )
    )

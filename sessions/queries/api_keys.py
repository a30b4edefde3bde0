"""Keys of the API. Nothing of a key itself is stored but its hash and its last characters."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import NotFound
from sessions.queries.ids import new_id
from sessions.records import ApiKey

_COLUMNS = (
    models.ApiKey.id,
    models.ApiKey.user_id,
    models.ApiKey.name,
    models.ApiKey.hint,
    models.ApiKey.max_requests,
    models.ApiKey.created_at,
    models.ApiKey.revoked_at,
)


async def create(
    db: AsyncConnection,
    user_id: str | None,
    name: str,
    key_hash: str,
    hint: str,
    max_requests: int | None,
    now: datetime,
) -> ApiKey:
    if user_id is None:
        user_id = new_id()
        await db.execute(insert(models.User).values(id=user_id, created_at=now))
    elif await db.scalar(select(models.User.id).where(models.User.id == user_id)) is None:
        raise NotFound("user", user_id)
    key = ApiKey(
        id=new_id(),
        user_id=user_id,
        name=name,
        hint=hint,
        max_requests=max_requests,
        created_at=now,
        revoked_at=None,
    )
    await db.execute(
        insert(models.ApiKey).values(
            id=key.id,
            user_id=user_id,
            key_hash=key_hash,
            name=name,
            hint=hint,
            max_requests=max_requests,
            created_at=now,
        )
    )
    return key


async def valid(db: AsyncConnection, key_hash: str) -> ApiKey | None:
    row = (
        (
            await db.execute(
                select(*_COLUMNS)
                .join(models.User, models.User.id == models.ApiKey.user_id)
                .where(
                    models.ApiKey.key_hash == key_hash,
                    models.ApiKey.revoked_at.is_(None),
                    models.User.disabled_at.is_(None),
                )
            )
        )
        .mappings()
        .one_or_none()
    )
    return None if row is None else ApiKey(**row)


async def all_keys(db: AsyncConnection) -> list[ApiKey]:
    rows = await db.execute(select(*_COLUMNS).order_by(models.ApiKey.created_at))
    return [ApiKey(**row) for row in rows.mappings()]


async def of_user(db: AsyncConnection, user_id: str) -> list[ApiKey]:
    rows = await db.execute(
        select(*_COLUMNS)
        .where(models.ApiKey.user_id == user_id, models.ApiKey.revoked_at.is_(None))
        .order_by(models.ApiKey.created_at)
    )
    return [ApiKey(**row) for row in rows.mappings()]


async def revoke(
    db: AsyncConnection, key_id: str, now: datetime, *, user_id: str | None = None
) -> bool:
    which = [models.ApiKey.id == key_id, models.ApiKey.revoked_at.is_(None)]
    if user_id is not None:
        which.append(models.ApiKey.user_id == user_id)
    done = await db.execute(update(models.ApiKey).where(*which).values(revoked_at=now))
    return done.rowcount > 0

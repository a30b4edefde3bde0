"""Users, their logins, and the server's stored settings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.queries.ids import new_id
from sessions.records import User

SEEN_RESOLUTION = timedelta(hours=1)  # a visit within it of the last one is not written


@dataclass(frozen=True, slots=True)
class Login:
    user: User
    last_seen_at: datetime


async def create_user(db: AsyncConnection, token_hash: str, now: datetime) -> User:
    user = User(id=new_id(), created_at=now)
    await db.execute(insert(models.User).values(id=user.id, created_at=now))
    await _add_login(db, user.id, token_hash, now)
    return user


async def login(db: AsyncConnection, token_hash: str) -> Login | None:
    row = (
        await db.execute(
            select(models.User.id, models.User.created_at, models.Login.last_seen_at)
            .join(models.Login, models.Login.user_id == models.User.id)
            .where(models.Login.token_hash == token_hash, models.Login.revoked_at.is_(None))
        )
    ).one_or_none()
    if row is None:
        return None
    return Login(User(id=row.id, created_at=row.created_at), row.last_seen_at)


async def touch_login(db: AsyncConnection, token_hash: str, now: datetime) -> None:
    await db.execute(
        update(models.Login).where(models.Login.token_hash == token_hash).values(last_seen_at=now)
    )


async def rotate_login(
    db: AsyncConnection, old_hash: str, new_hash: str, now: datetime
) -> User | None:
    found = await login(db, old_hash)
    if found is None:
        return None
    await revoke_login(db, old_hash, now)
    await _add_login(db, found.user.id, new_hash, now)
    return found.user


async def revoke_login(db: AsyncConnection, token_hash: str, now: datetime) -> bool:
    done = await db.execute(
        update(models.Login)
        .where(models.Login.token_hash == token_hash, models.Login.revoked_at.is_(None))
        .values(revoked_at=now)
    )
    return done.rowcount > 0


async def _add_login(db: AsyncConnection, user_id: str, token_hash: str, now: datetime) -> None:
    await db.execute(
        insert(models.Login).values(
            id=new_id(), user_id=user_id, token_hash=token_hash, created_at=now, last_seen_at=now
        )
    )


async def get_setting(db: AsyncConnection, key: str) -> str | None:
    return await db.scalar(select(models.Setting.value).where(models.Setting.key == key))


async def set_setting(db: AsyncConnection, key: str, value: str) -> None:
    await db.execute(
        upsert(models.Setting)
        .values(key=key, value=value)
        .on_conflict_do_update(index_elements=["key"], set_={"value": value})
    )


async def ensure_setting(db: AsyncConnection, key: str, value: str) -> str:
    await db.execute(upsert(models.Setting).values(key=key, value=value).on_conflict_do_nothing())
    return (
        await db.execute(select(models.Setting.value).where(models.Setting.key == key))
    ).scalar_one()

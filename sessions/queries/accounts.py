"""Users and their passwords."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.account_records import Account, Credentials, Name
from sessions.errors import NameTaken, NotFound
from sessions.queries.ids import new_id
from sessions.records import User

USER_COLUMNS = (
    models.User.id,
    models.User.created_at,
    models.User.name,
    models.User.is_operator,
    models.User.disabled_at,
)


def user_of(row: Any) -> User:
    return User(
        id=row.id,
        created_at=row.created_at,
        name=row.name,
        is_operator=row.is_operator,
        disabled_at=row.disabled_at,
    )


async def create_guest(db: AsyncConnection, now: datetime) -> User:
    user = User(id=new_id(), created_at=now)
    await db.execute(insert(models.User).values(id=user.id, created_at=now))
    return user


async def create_account(
    db: AsyncConnection, name: Name, password_hash: str, is_operator: bool, now: datetime
) -> User:
    user = await create_guest(db, now)
    return await name_user(db, user.id, name, password_hash, is_operator)


async def name_user(
    db: AsyncConnection, user_id: str, name: Name, password_hash: str, is_operator: bool
) -> User:
    """Make a guest an account. Raises NameTaken, NotFound (no such guest)."""
    try:
        done = await db.execute(
            update(models.User)
            .where(
                models.User.id == user_id,
                models.User.name.is_(None),
                models.User.disabled_at.is_(None),
            )
            .values(
                name=name.shown,
                name_key=name.key,
                password_hash=password_hash,
                is_operator=is_operator,
            )
        )
    except IntegrityError as error:
        raise NameTaken(name.shown) from error
    if done.rowcount == 0:
        raise NotFound("guest", user_id)
    return await user(db, user_id)


async def user(db: AsyncConnection, user_id: str) -> User:
    row = (await db.execute(select(*USER_COLUMNS).where(models.User.id == user_id))).one_or_none()
    if row is None:
        raise NotFound("user", user_id)
    return user_of(row)


async def by_name(db: AsyncConnection, name_key: str) -> User | None:
    row = (
        await db.execute(select(*USER_COLUMNS).where(models.User.name_key == name_key))
    ).one_or_none()
    return None if row is None else user_of(row)


async def credentials(db: AsyncConnection, *, name_key: str) -> Credentials | None:
    row = (
        await db.execute(
            select(*USER_COLUMNS, models.User.password_hash).where(
                models.User.name_key == name_key,
                models.User.password_hash.is_not(None),
                models.User.disabled_at.is_(None),
            )
        )
    ).one_or_none()
    return None if row is None else Credentials(user=user_of(row), password_hash=row.password_hash)


async def set_password(db: AsyncConnection, user_id: str, password_hash: str) -> None:
    await db.execute(
        update(models.User)
        .where(models.User.id == user_id, models.User.name.is_not(None))
        .values(password_hash=password_hash)
    )


async def password_hash(db: AsyncConnection, user_id: str) -> str | None:
    return await db.scalar(select(models.User.password_hash).where(models.User.id == user_id))


async def set_disabled(db: AsyncConnection, user_id: str, since: datetime | None) -> bool:
    done = await db.execute(
        update(models.User)
        .where(models.User.id == user_id, models.User.name.is_not(None))
        .values(disabled_at=since)
    )
    return done.rowcount > 0


async def forget(db: AsyncConnection, user_id: str, now: datetime) -> None:
    """Leave nothing of an account but a row that others may refer to."""
    await db.execute(
        update(models.User)
        .where(models.User.id == user_id)
        .values(name=None, name_key=None, password_hash=None, is_operator=False, disabled_at=now)
    )


async def has_operator(db: AsyncConnection) -> bool:
    found = await db.scalar(
        select(models.User.id)
        .where(models.User.is_operator, models.User.disabled_at.is_(None))
        .limit(1)
    )
    return found is not None


async def all_accounts(db: AsyncConnection) -> list[Account]:
    num_chats = (
        select(models.Chat.user_id, func.count().label("number"))
        .where(models.Chat.deleted_at.is_(None))
        .group_by(models.Chat.user_id)
        .subquery()
    )
    seen = (
        select(models.Login.user_id, func.max(models.Login.last_seen_at).label("at"))
        .where(models.Login.revoked_at.is_(None))
        .group_by(models.Login.user_id)
        .subquery()
    )
    rows = await db.execute(
        select(*USER_COLUMNS, func.coalesce(num_chats.c.number, 0).label("number"), seen.c.at)
        .outerjoin(num_chats, num_chats.c.user_id == models.User.id)
        .outerjoin(seen, seen.c.user_id == models.User.id)
        .where(models.User.name.is_not(None))
        .order_by(models.User.name_key)
    )
    return [Account(user=user_of(row), num_chats=row.number, last_seen_at=row.at) for row in rows]

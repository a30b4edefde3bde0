"""Logins of browsers. One that ends gives its browser back to the guest who was there before."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.account_records import LoginRecord, NewLogin
from sessions.queries.accounts import USER_COLUMNS, user_of
from sessions.queries.ids import new_id
from sessions.records import User

SEEN_RESOLUTION = timedelta(hours=1)  # a visit within it of the last one is not written
IDLE = timedelta(days=30)  # an account's login that was not used for so long is none any more


@dataclass(frozen=True, slots=True)
class Login:
    user: User
    guest_id: str | None
    last_seen_at: datetime


def _in_use(now: datetime) -> ColumnElement[bool]:
    """A guest's login is the only way to its chats, also where the guest waits behind another."""
    return or_(
        models.User.name.is_(None),
        models.Login.guest_id.is_not(None),
        models.Login.last_seen_at > now - IDLE,
    )


async def login(db: AsyncConnection, token_hash: str, now: datetime) -> Login | None:
    row = (
        await db.execute(
            select(*USER_COLUMNS, models.Login.guest_id, models.Login.last_seen_at)
            .join(models.Login, models.Login.user_id == models.User.id)
            .where(
                models.Login.token_hash == token_hash,
                models.Login.revoked_at.is_(None),
                models.User.disabled_at.is_(None),
                _in_use(now),
            )
        )
    ).one_or_none()
    return None if row is None else Login(user_of(row), row.guest_id, row.last_seen_at)


async def add(
    db: AsyncConnection, user_id: str, new: NewLogin, now: datetime, guest_id: str | None = None
) -> None:
    await db.execute(
        insert(models.Login).values(
            id=new_id(),
            user_id=user_id,
            token_hash=new.token_hash,
            agent=new.agent,
            guest_id=guest_id,
            created_at=now,
            last_seen_at=now,
        )
    )


async def touch(db: AsyncConnection, token_hash: str, now: datetime) -> None:
    await db.execute(
        update(models.Login).where(models.Login.token_hash == token_hash).values(last_seen_at=now)
    )


async def revoke(db: AsyncConnection, token_hash: str, now: datetime) -> bool:
    """End a login for good, its guest's way back included."""
    done = await db.execute(
        update(models.Login)
        .where(models.Login.token_hash == token_hash, models.Login.revoked_at.is_(None))
        .values(revoked_at=now)
    )
    return done.rowcount > 0


async def of_user(db: AsyncConnection, user_id: str, now: datetime) -> list[LoginRecord]:
    rows = await db.execute(
        select(
            models.Login.id,
            models.Login.token_hash,
            models.Login.agent,
            models.Login.created_at,
            models.Login.last_seen_at,
        )
        .join(models.User, models.User.id == models.Login.user_id)
        .where(models.Login.user_id == user_id, models.Login.revoked_at.is_(None), _in_use(now))
        .order_by(models.Login.last_seen_at.desc())
    )
    return [LoginRecord(**row) for row in rows.mappings()]


async def end(
    db: AsyncConnection,
    user_id: str,
    now: datetime,
    *,
    login_id: str | None = None,
    but: str | None = None,
) -> int:
    """End a user's logins: one, or all but the one with the hash `but`; returns how many."""
    which: list[ColumnElement[bool]] = [
        models.Login.user_id == user_id,
        models.Login.revoked_at.is_(None),
    ]
    if login_id is not None:
        which.append(models.Login.id == login_id)
    if but is not None:
        which.append(models.Login.token_hash != but)
    plain = await db.execute(
        update(models.Login).where(*which, models.Login.guest_id.is_(None)).values(revoked_at=now)
    )
    given_back = await db.execute(
        update(models.Login)
        .where(*which, models.Login.guest_id.is_not(None))
        .values(user_id=models.Login.guest_id, guest_id=None)
    )
    return plain.rowcount + given_back.rowcount


async def forget_guest(db: AsyncConnection, guest_id: str) -> None:
    await db.execute(
        update(models.Login).where(models.Login.guest_id == guest_id).values(guest_id=None)
    )

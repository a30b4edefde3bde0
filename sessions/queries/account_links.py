"""Links that work once: invitations, and new passwords."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.account_records import AccountLink
from sessions.errors import LinkNotValid
from sessions.queries.ids import new_id

_COLUMNS = (
    models.AccountLink.id,
    models.AccountLink.user_id,
    models.AccountLink.for_operator,
    models.AccountLink.created_at,
    models.AccountLink.expires_at,
)


async def create(
    db: AsyncConnection,
    token_hash: str,
    user_id: str | None,
    for_operator: bool,
    now: datetime,
    expires_at: datetime,
) -> AccountLink:
    link = AccountLink(
        id=new_id(),
        user_id=user_id,
        for_operator=for_operator,
        created_at=now,
        expires_at=expires_at,
    )
    await db.execute(
        insert(models.AccountLink).values(
            id=link.id,
            token_hash=token_hash,
            user_id=user_id,
            for_operator=for_operator,
            created_at=now,
            expires_at=expires_at,
        )
    )
    return link


async def valid(db: AsyncConnection, token_hash: str, now: datetime) -> AccountLink | None:
    row = (
        (
            await db.execute(
                select(*_COLUMNS).where(
                    models.AccountLink.token_hash == token_hash,
                    models.AccountLink.used_at.is_(None),
                    models.AccountLink.expires_at > now,
                )
            )
        )
        .mappings()
        .one_or_none()
    )
    return None if row is None else AccountLink(**row)


async def use(db: AsyncConnection, token_hash: str, now: datetime) -> AccountLink:
    """Take a link for good. Raises LinkNotValid."""
    link = await valid(db, token_hash, now)
    if link is None:
        raise LinkNotValid
    await end(db, link.id, now)
    return link


async def end(db: AsyncConnection, link_id: str, now: datetime) -> bool:
    done = await db.execute(
        update(models.AccountLink)
        .where(models.AccountLink.id == link_id, models.AccountLink.used_at.is_(None))
        .values(used_at=now)
    )
    return done.rowcount > 0


async def end_of_user(db: AsyncConnection, user_id: str, now: datetime) -> None:
    await db.execute(
        update(models.AccountLink)
        .where(models.AccountLink.user_id == user_id, models.AccountLink.used_at.is_(None))
        .values(used_at=now)
    )


async def open_invitations(db: AsyncConnection, now: datetime) -> list[AccountLink]:
    rows = await db.execute(
        select(*_COLUMNS)
        .where(
            models.AccountLink.user_id.is_(None),
            models.AccountLink.used_at.is_(None),
            models.AccountLink.expires_at > now,
        )
        .order_by(models.AccountLink.created_at)
    )
    return [AccountLink(**row) for row in rows.mappings()]

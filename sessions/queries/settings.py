"""The server's stored settings."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models


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

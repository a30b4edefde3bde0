"""Who and what takes how much of the database, for its operator; never titles or texts.

None of these reads a message: `chat_storage` has their bytes. By SQLite's planner (a test holds
it to that) the largest chats are one pass over `chat_storage`, users one over the index of chats
by user, assistants one over the index of chats by prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.assistant_records import AssistantUse, ChatUse, Totals, UserUse

IDS_AT_ONCE = 10_000  # SQLite takes 32,766 variables


async def totals(db: AsyncConnection) -> Totals:
    row = (
        await db.execute(
            select(
                select(func.count()).select_from(models.User).scalar_subquery(),
                select(func.count()).select_from(models.Chat).scalar_subquery(),
                func.coalesce(func.sum(models.ChatStorage.messages), 0),
                func.coalesce(func.sum(models.ChatStorage.bytes), 0),
            )
        )
    ).one()
    return Totals(users=row[0], chats=row[1], messages=row[2], message_bytes=row[3])


def users_query(limit: int) -> Select[*tuple[Any, ...]]:
    """The users seen last."""
    user, chat, storage, login = models.User, models.Chat, models.ChatStorage, models.Login
    of_chats = (
        select(
            chat.user_id,
            func.count().label("chats"),
            func.coalesce(func.sum(storage.bytes), 0).label("message_bytes"),
        )
        .outerjoin(storage, storage.chat_id == chat.id)
        .group_by(chat.user_id)
        .subquery()
    )
    seen = (
        select(login.user_id, func.max(login.last_seen_at).label("last_seen_at"))
        .group_by(login.user_id)
        .subquery()
    )
    return (
        select(
            user.id.label("user_id"),
            user.name,
            user.created_at,
            seen.c.last_seen_at,
            func.coalesce(of_chats.c.chats, 0).label("chats"),
            func.coalesce(of_chats.c.message_bytes, 0).label("message_bytes"),
        )
        .outerjoin(seen, seen.c.user_id == user.id)
        .outerjoin(of_chats, of_chats.c.user_id == user.id)
        .order_by(seen.c.last_seen_at.desc().nulls_last(), user.id)
        .limit(limit)
    )


async def users(db: AsyncConnection, limit: int) -> list[UserUse]:
    return [UserUse(**row) for row in (await db.execute(users_query(limit))).mappings()]


def largest_chats_query(limit: int) -> Select[*tuple[Any, ...]]:
    storage = models.ChatStorage
    largest = select(storage.chat_id).order_by(storage.bytes.desc()).limit(limit)
    return _chats_query().where(models.Chat.id.in_(largest))


async def largest_chats(db: AsyncConnection, limit: int) -> list[ChatUse]:
    """Those with the most bytes of messages, in any order."""
    return [ChatUse(**row) for row in (await db.execute(largest_chats_query(limit))).mappings()]


async def chats(db: AsyncConnection, chat_ids: Sequence[str]) -> list[ChatUse]:
    query = _chats_query().where(models.Chat.id.in_(chat_ids))
    return [ChatUse(**row) for row in (await db.execute(query)).mappings()]


async def owners(db: AsyncConnection, chat_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """By chat its user and its assistant; without those that are gone."""
    found: dict[str, tuple[str, str]] = {}
    for start in range(0, len(chat_ids), IDS_AT_ONCE):
        query = (
            select(models.Chat.id, models.Chat.user_id, models.AssistantVersion.assistant_id)
            .join(models.Prefix, models.Prefix.id == models.Chat.prefix_id)
            .join(
                models.AssistantVersion,
                models.AssistantVersion.id == models.Prefix.assistant_version_id,
            )
            .where(models.Chat.id.in_(chat_ids[start : start + IDS_AT_ONCE]))
        )
        for chat_id, user_id, assistant_id in await db.execute(query):
            found[chat_id] = (user_id, assistant_id)
    return found


async def kept_state_chats(db: AsyncConnection) -> set[str]:
    return set(await db.scalars(select(models.ApiState.chat_id).distinct()))


def assistants_query() -> Select[*tuple[Any, ...]]:
    assistant, version, prefix = models.Assistant, models.AssistantVersion, models.Prefix
    document, chat, storage = models.AssistantDocument, models.Chat, models.ChatStorage
    of_chats = (
        select(
            version.assistant_id,
            func.count().label("chats"),
            func.coalesce(func.sum(storage.bytes), 0).label("message_bytes"),
        )
        .select_from(chat)
        .join(prefix, prefix.id == chat.prefix_id)
        .join(version, version.id == prefix.assistant_version_id)
        .outerjoin(storage, storage.chat_id == chat.id)
        .group_by(version.assistant_id)
        .subquery()
    )
    of_documents = (
        select(
            document.assistant_version_id.label("version_id"),
            func.sum(func.length(document.text)).label("size"),
        )
        .group_by(document.assistant_version_id)
        .subquery()
    )
    of_versions = (
        select(
            version.assistant_id,
            func.count().label("versions"),
            func.sum(
                func.length(version.system_prompt) + func.coalesce(of_documents.c.size, 0)
            ).label("prompt_bytes"),
        )
        .outerjoin(of_documents, of_documents.c.version_id == version.id)
        .group_by(version.assistant_id)
        .subquery()
    )
    return (
        select(
            assistant.id.label("assistant_id"),
            assistant.name,
            assistant.owner_id,
            assistant.published,
            assistant.deleted_at.is_not(None).label("deleted"),
            func.coalesce(of_versions.c.versions, 0).label("versions"),
            func.coalesce(of_chats.c.chats, 0).label("chats"),
            func.coalesce(of_chats.c.message_bytes, 0).label("message_bytes"),
            func.coalesce(of_versions.c.prompt_bytes, 0).label("prompt_bytes"),
        )
        .outerjoin(of_chats, of_chats.c.assistant_id == assistant.id)
        .outerjoin(of_versions, of_versions.c.assistant_id == assistant.id)
        .order_by(assistant.position, assistant.created_at, assistant.id)
    )


async def assistants(db: AsyncConnection) -> list[AssistantUse]:
    return [AssistantUse(**row) for row in (await db.execute(assistants_query())).mappings()]


def _chats_query() -> Select[*tuple[Any, ...]]:
    chat, storage = models.Chat, models.ChatStorage
    return (
        select(
            chat.id.label("chat_id"),
            chat.user_id,
            models.Assistant.name.label("assistant_name"),
            models.Assistant.published.label("assistant_published"),
            chat.updated_at,
            func.coalesce(storage.messages, 0).label("messages"),
            func.coalesce(storage.bytes, 0).label("message_bytes"),
        )
        .join(models.Prefix, models.Prefix.id == chat.prefix_id)
        .join(
            models.AssistantVersion,
            models.AssistantVersion.id == models.Prefix.assistant_version_id,
        )
        .join(models.Assistant, models.Assistant.id == models.AssistantVersion.assistant_id)
        .outerjoin(storage, storage.chat_id == chat.id)
    )


RATED_TURNS = 200  # the latest ones


async def prefill_rate(db: AsyncConnection) -> tuple[int, int, float]:
    """Of the latest turns that read a prompt: how many, their tokens, and milliseconds of that."""
    turn, latency = models.Turn, models.TurnLatency
    tokens = latency.new_tokens + latency.recomputed_tokens
    latest = (
        select(tokens.label("tokens"), latency.prefill_ms)
        .join(turn, turn.id == latency.turn_id)
        # A prefix that the turn brought in itself is not in the time of its own prompt.
        .where(latency.prefill_ms > 0, tokens >= 16, latency.prefix_computed_tokens == 0)
        .order_by(turn.created_at.desc())
        .limit(RATED_TURNS)
        .subquery()
    )
    row = (
        await db.execute(
            select(
                func.count(),
                func.coalesce(func.sum(latest.c.tokens), 0),
                func.coalesce(func.sum(latest.c.prefill_ms), 0.0),
            )
        )
    ).one()
    return row[0], row[1], row[2]

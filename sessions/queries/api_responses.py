"""Responses and conversations of the API: chats whose turns a program asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, exists, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import NotFound, TurnRunning
from sessions.queries import api_conversations, assistants, chats, turns
from sessions.records import ApiConversation, ApiItem, ApiResponse, Prefix, Turn

ORIGIN = "api"
_NAME = "API"  # of each user's hidden assistant


def version_id(user_id: str, key: str) -> str:
    """The id of the version that holds a user's own system prompt, told apart by `key`."""
    return hashlib.sha256(f"api {user_id} {key}".encode()).hexdigest()[:32]


async def ensure_prefix(
    db: AsyncConnection,
    user_id: str,
    key: str,
    system_text: str,
    tokenizer_digest: str,
    token_ids: Sequence[int],
    now: datetime,
) -> Prefix:
    """Each user's system prompts are versions of one assistant that no list shows."""
    assistant_id = hashlib.sha256(f"api {user_id}".encode()).hexdigest()[:32]
    await db.execute(
        upsert(models.Assistant)
        .values(
            id=assistant_id,
            name=_NAME,
            description="",
            greeting="",
            sampling={},
            published=False,
            position=0,
            created_at=now,
        )
        .on_conflict_do_nothing()
    )
    version = models.AssistantVersion
    own = version_id(user_id, key)
    if await db.scalar(select(version.id).where(version.id == own)) is None:
        last = await db.scalar(
            select(func.max(version.number)).where(version.assistant_id == assistant_id)
        )
        await db.execute(
            insert(version).values(
                id=own,
                assistant_id=assistant_id,
                number=(last or 0) + 1,
                system_prompt=system_text,
                created_at=now,
            )
        )
    prefix = await assistants.ensure_prefix(db, own, tokenizer_digest, token_ids, now)
    # As good as new: a chat will have it in a moment.
    await db.execute(
        update(models.Prefix).where(models.Prefix.id == prefix.id).values(created_at=now)
    )
    return prefix


async def unused_prefixes(db: AsyncConnection, before: datetime) -> list[str]:
    """Prefixes of the API, made before then, that no chat has."""
    prefix, version, chat = models.Prefix, models.AssistantVersion, models.Chat
    query = (
        select(prefix.id)
        .join(version, version.id == prefix.assistant_version_id)
        .join(models.Assistant, models.Assistant.id == version.assistant_id)
        .where(models.Assistant.name == _NAME, models.Assistant.slug.is_(None))
        .where(models.Assistant.owner_id.is_(None), prefix.created_at < before)
        .where(~exists().where(chat.prefix_id == prefix.id))
    )
    return list(await db.scalars(query))


async def drop_prefixes(db: AsyncConnection, prefix_ids: Sequence[str]) -> None:
    """Delete those that no chat has meanwhile, and their versions."""
    prefix, version, chat = models.Prefix, models.AssistantVersion, models.Chat
    rows = await db.execute(
        delete(prefix)
        .where(prefix.id.in_(prefix_ids), ~exists().where(chat.prefix_id == prefix.id))
        .returning(prefix.assistant_version_id)
    )
    await db.execute(
        delete(version).where(
            version.id.in_([row[0] for row in rows]),
            ~exists().where(prefix.assistant_version_id == version.id),
        )
    )


async def prefix_of_chat(db: AsyncConnection, chat_id: str) -> Prefix:
    prefix_id = await db.scalar(select(models.Chat.prefix_id).where(models.Chat.id == chat_id))
    if prefix_id is None:
        raise NotFound("chat", chat_id)
    return await assistants.prefix_by_id(db, prefix_id)


async def start(
    db: AsyncConnection,
    *,
    user_id: str,
    response_id: str,
    prefix_id: str,
    chat_id: str | None,
    parent_id: str | None,
    title: str,
    items: Sequence[ApiItem],
    num_inputs: int,
    sampling: Mapping[str, Any],
    body: Mapping[str, Any],
    conversation: ApiConversation | None,
    now: datetime,
) -> Turn:
    """Append messages to a chat, or begin one with them, and an answer that runs."""
    if conversation is not None and conversation.chat_id not in (None, chat_id):
        await api_conversations.not_running(db, str(conversation.chat_id))
    if chat_id is None:
        chat = await chats.create(db, user_id, prefix_id, title, now)
        chat_id = chat.id
        await db.execute(update(models.Chat).where(models.Chat.id == chat_id).values(origin=ORIGIN))
    for item in items:
        await db.execute(
            insert(models.Message).values(
                id=item.id,
                chat_id=chat_id,
                parent_id=parent_id,
                role=item.role,
                text=item.text,
                token_ids=item.token_ids,
                status="complete",
                created_at=now,
                completed_at=now,
            )
        )
        parent_id = item.id
    assert parent_id is not None, "a response has at least one message before it"
    [turn] = await turns.add_answers(db, chat_id, parent_id, sampling, 1, now)
    await db.execute(
        insert(models.ApiResponse).values(
            id=response_id,
            user_id=user_id,
            chat_id=chat_id,
            message_id=turn.message_id,
            num_inputs=num_inputs,
            body=dict(body),
            created_at=now,
        )
    )
    if conversation is not None and not await api_conversations.change_conversation(
        db, conversation, chat_id=chat_id, leaf_id=turn.message_id, items=[]
    ):
        raise TurnRunning(chat_id)
    return turn


async def response(db: AsyncConnection, user_id: str, response_id: str) -> ApiResponse | None:
    table = models.ApiResponse
    row = (
        (
            await db.execute(
                select(table.__table__)
                .join(models.Chat, models.Chat.id == table.chat_id)
                .where(
                    table.id == response_id,
                    table.user_id == user_id,
                    models.Chat.deleted_at.is_(None),
                )
            )
        )
        .mappings()
        .one_or_none()
    )
    return None if row is None else ApiResponse(**row)


async def set_body(db: AsyncConnection, response_id: str, body: Mapping[str, Any]) -> None:
    await db.execute(
        update(models.ApiResponse)
        .where(models.ApiResponse.id == response_id)
        .values(body=dict(body))
    )


async def delete_response(
    db: AsyncConnection, user_id: str, response_id: str, now: datetime
) -> bool:
    """The chat goes with its last response, unless a conversation has it."""
    found = await response(db, user_id, response_id)
    if found is None:
        return False
    await db.execute(delete(models.ApiResponse).where(models.ApiResponse.id == response_id))
    await api_conversations.delete_unused(db, found.chat_id, now)
    return True

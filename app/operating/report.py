"""All that the operator's page tells, gathered from database, store, engine and settings."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.operating.plan import PlanReport, plan_report
from app.settings import Settings
from engine.client import Engine
from engine.errors import EngineUnavailable
from engine.messages import EngineInfo, EngineStats
from sessions.assistant_records import AssistantUse, ChatUse, Totals, UserUse
from sessions.chunks import owner_sizes
from sessions.repository import Repository

logger = logging.getLogger(__name__)

STATS_WAIT_S = 2.0
SHOWN_USERS = 50
SHOWN_CHATS = 25
SHOWN_ASSISTANTS = 50
CHAT, PREFIX = "c-", "p-"  # what owners in the store begin with


@dataclass(frozen=True, kw_only=True)
class ChatRow:
    use: ChatUse
    checkpoint_bytes: int


@dataclass(frozen=True, kw_only=True)
class UserRow:
    use: UserUse
    checkpoint_bytes: int


@dataclass(frozen=True, kw_only=True)
class AssistantRow:
    """`name` says whose it is where it is private; `resident` counts its chats in memory."""

    use: AssistantUse
    name: str
    checkpoint_bytes: int  # of its chats
    prefix_bytes: int  # of the checkpoints of what they share
    resident: int | None


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Bytes on disk; `other_bytes` are of calls of the API and of chats that are gone."""

    checkpoint_bytes: int
    other_bytes: int
    other_owners: int
    database_bytes: int
    free_bytes: int
    store_problem: str


@dataclass(frozen=True, kw_only=True)
class OperatorReport:
    info: EngineInfo
    stats: EngineStats | None
    totals: Totals
    users: list[UserRow]
    chats: list[ChatRow]
    assistants: list[AssistantRow]
    storage: Storage
    plan: PlanReport | None


async def operator_report(
    settings: Settings, repository: Repository, engine: Engine
) -> OperatorReport:
    """Of this moment. Reads no message; the store's index once."""
    sizes, problem = await asyncio.to_thread(_sizes, settings)
    by_chat = {
        name.removeprefix(CHAT): size for name, size in sizes.items() if name.startswith(CHAT)
    }
    owners = await repository.chat_owners(list(by_chat))
    of_users: Counter[str] = Counter()
    of_assistants: Counter[str] = Counter()
    for chat_id, (user_id, assistant_id) in owners.items():
        of_users[user_id] += by_chat[chat_id]
        of_assistants[assistant_id] += by_chat[chat_id]
    others = [size for chat_id, size in by_chat.items() if chat_id not in owners]
    stats = await _stats(engine)
    return OperatorReport(
        info=engine.info,
        stats=stats,
        totals=await repository.totals(),
        users=[
            UserRow(use=use, checkpoint_bytes=of_users[use.user_id])
            for use in await repository.user_uses(limit=SHOWN_USERS)
        ],
        chats=await _chats(repository, by_chat),
        assistants=await _assistants(repository, sizes, of_assistants, stats),
        storage=Storage(
            checkpoint_bytes=sum(sizes.values()),
            other_bytes=sum(others),
            other_owners=len(others),
            database_bytes=_database_bytes(settings.database_path),
            free_bytes=shutil.disk_usage(settings.data_dir).free,
            store_problem=problem,
        ),
        plan=await asyncio.to_thread(plan_report, settings),
    )


async def owners_gone(settings: Settings, repository: Repository) -> list[str]:
    """Owners in the store whose chat is gone.

    The store is looked at first: a chat is in the database before the engine hears of it. Calls
    of the API that run now may be among them; dropping their checkpoints costs them time.
    """
    sizes, _ = await asyncio.to_thread(_sizes, settings)
    chats = [name.removeprefix(CHAT) for name in sizes if name.startswith(CHAT)]
    known = (await repository.chat_owners(chats)).keys() | await repository.kept_state_chats()
    return [CHAT + chat_id for chat_id in chats if chat_id not in known]


def _sizes(settings: Settings) -> tuple[dict[str, int], str]:
    try:
        return owner_sizes(settings.chunk_dirs[0]), ""
    except sqlite3.Error as error:
        logger.warning("the index of the checkpoints cannot be read: %s", error)
        return {}, f"The index of the checkpoints cannot be read: {error}."


def _database_bytes(path: Path) -> int:
    files = (path.with_name(path.name + suffix) for suffix in ("", "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


async def _stats(engine: Engine) -> EngineStats | None:
    try:
        async with asyncio.timeout(STATS_WAIT_S):
            return await engine.stats()
    except (TimeoutError, EngineUnavailable):
        return None


async def _chats(repository: Repository, by_chat: Mapping[str, int]) -> list[ChatRow]:
    """The largest ones, by checkpoints and messages together."""
    largest = sorted(by_chat, key=lambda chat_id: by_chat[chat_id], reverse=True)[:SHOWN_CHATS]
    found = {use.chat_id: use for use in await repository.largest_chats(limit=SHOWN_CHATS)}
    missing = [chat_id for chat_id in largest if chat_id not in found]
    found |= {use.chat_id: use for use in await repository.chat_uses(missing)}
    rows = [
        ChatRow(use=use, checkpoint_bytes=by_chat.get(chat_id, 0)) for chat_id, use in found.items()
    ]
    rows.sort(key=lambda row: row.checkpoint_bytes + row.use.message_bytes, reverse=True)
    return rows[:SHOWN_CHATS]


async def _assistants(
    repository: Repository,
    sizes: Mapping[str, int],
    of_assistants: Mapping[str, int],
    stats: EngineStats | None,
) -> list[AssistantRow]:
    resident = {use.scope: use.chats for use in stats.prefixes} if stats else {}
    rows = [
        AssistantRow(
            use=use,
            name=_name(use),
            checkpoint_bytes=of_assistants.get(use.assistant_id, 0),
            prefix_bytes=sizes.get(PREFIX + use.assistant_id, 0),
            resident=resident.get(use.assistant_id, 0) if stats else None,
        )
        for use in await repository.assistant_uses()
    ]
    rows.sort(
        key=lambda row: row.checkpoint_bytes + row.prefix_bytes + row.use.message_bytes,
        reverse=True,
    )
    return rows[:SHOWN_ASSISTANTS]


def _name(use: AssistantUse) -> str:
    if use.published:
        return use.name
    kind = "Private" if use.owner_id else "Not listed"
    return f"{kind}, {use.assistant_id[:8]}" + (", deleted" if use.deleted else "")

"""A deleted chat's text is gone from every file of the database."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from sessions import database as database_module
from sessions import models
from sessions.database import Database
from sessions.records import Progress, Turn
from sessions.repository import Repository

if TYPE_CHECKING:
    from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio

SECRET = "Zx9-private-words"


def _secret(words: int) -> str:
    return " ".join(f"{SECRET}-{number}" for number in range(words))


def _files_with_secret(db_path: Path) -> list[str]:
    files = sorted(db_path.parent.glob("rejoinder.db*"))
    assert files
    return [file.name for file in files if SECRET.encode() in file.read_bytes()]


async def _secret_chat(chats: Chats, repository: Repository, rng: random.Random) -> Turn:
    """A chat whose rows were rewritten and moved about as they are in use."""
    first = await chats.start(_secret(rng.choice([1, 50, 5000])))
    turn = first
    for _ in range(rng.randrange(4)):
        text = ""
        for _ in range(rng.randrange(6)):
            text += _secret(rng.choice([1, 30, 400]))
            await repository.save_progress(
                [Progress(message_id=turn.message_id, text=text, token_ids=[1] * len(text))]
            )
        await chats.answer(turn, text)
        turn = await chats.ask(first.chat_id, turn.message_id, _secret(rng.choice([1, 200])))
    await repository.rename_chat(chats.user.id, first.chat_id, _secret(3))
    return first


@pytest.mark.parametrize("order", range(4))
async def test_text_is_gone_from_the_files(
    repository: Repository, chats: Chats, db_path: Path, order: int
) -> None:
    rng = random.Random(order)
    kept, secret = [], []
    for number in range(12):
        secret.append(await _secret_chat(chats, repository, rng))
        kept.append(await chats.start(f"kept {number} " + "k" * rng.choice([10, 3000, 20_000])))
    assert _files_with_secret(db_path)
    rng.shuffle(secret)
    for turn in secret:
        assert await repository.delete_chat(chats.user.id, turn.chat_id)
        assert not await repository.delete_chat(chats.user.id, turn.chat_id)
    assert _files_with_secret(db_path) == [], "while the database is open"
    assert (db_path.parent / "rejoinder.db-wal").stat().st_size == 0
    titles = {chat.title for chat in await repository.chats(chats.user.id)}
    assert len(titles) == 12
    for turn in kept:
        assert len(await repository.path(turn.chat_id)) == 2
    await repository._database.close()
    assert _files_with_secret(db_path) == [], "after it was closed"


async def test_no_row_of_the_chat_is_left(
    database: Database, repository: Repository, chats: Chats
) -> None:
    turn = await chats.start()
    await chats.answer(turn)
    await repository.retry_turn(turn.chat_id, turn.message_id, {})
    assert await repository.delete_chat(chats.user.id, turn.chat_id)
    async with database.read() as db:
        for table in (models.Chat, models.Message, models.Turn, models.TurnLatency):
            assert (await db.execute(select(table.__table__))).all() == []
    assert not await repository.finish_turn(
        turn.id,
        status="complete",
        finish_reason="eos",
        error=None,
        text=SECRET,
        token_ids=[],
        latency=None,
    )


async def test_checkpoints_are_remembered_until_they_are_gone(
    repository: Repository, chats: Chats
) -> None:
    one, two, kept = [await chats.start(text) for text in ("one", "two", "kept")]
    assert await repository.chats_to_forget() == []
    for turn in (one, two):
        await repository.delete_chat(chats.user.id, turn.chat_id)
    assert set(await repository.chats_to_forget()) == {one.chat_id, two.chat_id}
    await repository.chats_forgotten([one.chat_id, kept.chat_id])
    await repository.chats_forgotten([])
    assert await repository.chats_to_forget() == [two.chat_id]


async def test_log_held_by_a_reader_is_cut_when_that_ends(
    database: Database,
    repository: Repository,
    chats: Chats,
    db_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_module, "TRUNCATE_TIMEOUT_MS", 20)
    monkeypatch.setattr(database_module, "TRUNCATE_RETRY_S", 0.05)
    turn = await chats.start(_secret(100))
    async with database.read() as db:
        assert await db.scalar(select(models.Chat.id)) == turn.chat_id
        assert await repository.delete_chat(chats.user.id, turn.chat_id)
        assert _files_with_secret(db_path), "the reader still sees it"
    for _ in range(100):
        if not _files_with_secret(db_path):
            break
        await asyncio.sleep(0.05)
    assert _files_with_secret(db_path) == []

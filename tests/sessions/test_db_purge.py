"""A deleted chat comes back when asked in time; later its text is gone from every file."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from sessions import database as database_module
from sessions import models
from sessions.answer_records import Rendered
from sessions.database import Database
from sessions.errors import NotFound
from sessions.queries import purge
from sessions.records import Progress, Turn
from sessions.repository import Repository

if TYPE_CHECKING:
    from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio

SECRET = "Zx9-private-words"


async def _purge(repository: Repository, user_id: str, *chat_ids: str) -> None:
    for chat_id in chat_ids:
        assert await repository.delete_chat(user_id, chat_id)
    assert await repository.purge_deleted(datetime.now(UTC)) == len(chat_ids)


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
        html = Rendered(message_id=turn.message_id, key="1", html=f"<p>{text}</p>")
        await repository.keep_rendered([html])
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
    await _purge(repository, chats.user.id, *[turn.chat_id for turn in secret])
    for turn in secret:
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
    html = Rendered(message_id=turn.message_id, key="1", html=SECRET)
    await repository.keep_rendered([html])
    await repository.answer_again(turn.chat_id, turn.message_id, {})
    await _purge(repository, chats.user.id, turn.chat_id)
    async with database.read() as db:
        for table in (
            models.Chat,
            models.Message,
            models.Turn,
            models.TurnLatency,
            models.SearchEntry,
            models.RenderedAnswer,
            models.PathMark,
        ):
            assert (await db.execute(select(table.__table__))).all() == []
    await repository.keep_rendered([html])
    assert await repository.rendered_answers([turn.message_id]) == [], "it came too late"
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
    await _purge(repository, chats.user.id, one.chat_id, two.chat_id)
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
        await _purge(repository, chats.user.id, turn.chat_id)
        assert _files_with_secret(db_path), "the reader still sees it"
    for _ in range(100):
        if not _files_with_secret(db_path):
            break
        await asyncio.sleep(0.05)
    assert _files_with_secret(db_path) == []


RARE = "ꙮ꙱ꙷꙴꙵ"  # each trigram of it is in no other text, and stands whole in the index


def _in_index(db_path: Path) -> bool:
    """Whether the files of the search index still hold such a trigram, live or removed."""
    with closing(sqlite3.connect(db_path)) as db:
        blocks = [
            block
            for name in ("title", "message")
            for (block,) in db.execute(f"SELECT block FROM {name}_search_data")
        ]
    return any(char.encode() in block for block in blocks for char in RARE)


@pytest.mark.parametrize("pages", [1, purge.MERGE_PAGES])
async def test_words_leave_the_search_index_too(
    repository: Repository,
    chats: Chats,
    db_path: Path,
    pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(purge, "MERGE_PAGES", pages)
    for number in range(30):
        await chats.answer(await chats.start(f"kept {number} " + "words and more " * 30))
    secret = await chats.start(f"{RARE} asked")
    await chats.answer(secret, f"answered {RARE}")
    await repository.rename_chat(chats.user.id, secret.chat_id, f"a title {RARE}")
    for number in range(30):
        await chats.answer(await chats.start(f"later {number} " + "words and more " * 30))
    assert _in_index(db_path)
    await _purge(repository, chats.user.id, secret.chat_id)
    assert await repository.search_messages(chats.user.id, [RARE]) == []
    assert _in_index(db_path), "segments are never changed in place"
    await repository.merge_search(pause_s=0)
    assert not _in_index(db_path)
    files = sorted(db_path.parent.glob("rejoinder.db*"))
    found = [file.name for file in files if any(c.encode() in file.read_bytes() for c in RARE)]
    assert found == []
    assert len(await repository.search_messages(chats.user.id, ["words and more"])) == 60
    with closing(sqlite3.connect(db_path)) as db:
        for name in ("title", "message"):
            segments = db.execute(f"SELECT count(DISTINCT segid) FROM {name}_search_idx").fetchone()
            assert segments == (1,)


async def test_a_merge_that_was_cut_off_is_done_by_the_next_run(
    repository: Repository, chats: Chats, db_path: Path
) -> None:
    turn = await chats.start(RARE)
    await chats.answer(turn, "answer")
    await _purge(repository, chats.user.id, turn.chat_id)
    await repository._database.close()
    again = await Database.open(db_path)
    await Repository(again).merge_search(pause_s=0)
    assert not _in_index(db_path)
    await again.close()


async def test_a_deleted_chat_is_nowhere_and_can_come_back(
    repository: Repository, chats: Chats
) -> None:
    user_id = chats.user.id
    turn = await chats.start("needle in the question")
    await chats.answer(turn, "needle in the answer")
    kept = await chats.start("kept")
    stranger = await repository.create_user("stranger")
    assert not await repository.delete_chat(stranger.id, turn.chat_id)
    assert await repository.delete_chat(user_id, turn.chat_id)
    assert [chat.id for chat in await repository.chats(user_id)] == [kept.chat_id]
    assert await repository.chat(user_id, turn.chat_id) is None
    assert await repository.exported_chat(user_id, turn.chat_id) is None
    assert await repository.chat_ids(user_id) == [kept.chat_id]
    assert await repository.chat_of_message(user_id, turn.message_id) is None
    assert await repository.search_messages(user_id, ["needle"]) == []
    assert await repository.search_titles(user_id, ["needle"]) == []
    assert not await repository.rename_chat(user_id, turn.chat_id, "new")
    assert not await repository.pin_chat(user_id, turn.chat_id, True)
    with pytest.raises(NotFound):
        await chats.ask(turn.chat_id, turn.message_id)
    [deleted] = await repository.deleted_chats(user_id)
    assert (deleted.id, deleted.title) == (turn.chat_id, "title of needle in the question")
    assert await repository.deleted_chats(stranger.id) == []

    assert await repository.purge_deleted(deleted.deleted_at - timedelta(seconds=1)) == 0
    assert not await repository.restore_chat(stranger.id, turn.chat_id)
    assert await repository.restore_chat(user_id, turn.chat_id)
    assert not await repository.restore_chat(user_id, turn.chat_id)
    assert len(await repository.chats(user_id)) == 2
    assert len(await repository.search_messages(user_id, ["needle"])) == 2
    assert await repository.purge_deleted(datetime.now(UTC)) == 0, "nothing is deleted any more"

"""Assistants that people write: versions, stale changes, who sees what, moved chats, use."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Select
from sqlalchemy.dialects import sqlite

from sessions import migrate
from sessions.assistant_records import AssistantDocument, AssistantDraft
from sessions.errors import AssistantChanged, NotFound, TurnRunning
from sessions.queries import usage
from sessions.records import User
from sessions.repository import Repository
from tests.sessions.conftest import Chats
from tests.sessions.test_db_groups import _upgrade_to

pytestmark = pytest.mark.anyio

DRAFT = AssistantDraft(
    name="Handbook",
    description="Knows the handbook.",
    greeting="Ask.",
    system_prompt="You know the handbook.",
    documents=[
        AssistantDocument(name="Leave", text="25 days.\r\n"),
        AssistantDocument(name="Tea", text=" at four "),
    ],
    sampling={"temperature": 0.2},
)


async def test_prompt_and_documents_make_versions_the_rest_does_not(
    repository: Repository, user: User
) -> None:
    made = await repository.create_assistant(user.id, DRAFT)
    found = await repository.assistant(user.id, made)
    assert found is not None
    assert (found.draft, found.revision, found.version.number) == (DRAFT, 1, 1)
    assert (found.published, found.owner_id, found.slug) == (False, user.id, None)

    named = replace(DRAFT, name="Manual", greeting="", sampling={})
    assert await repository.save_assistant(made, 1, named) == 1
    shorter = replace(named, documents=DRAFT.documents[:1])
    assert await repository.save_assistant(made, 2, shorter) == 2
    worded = replace(shorter, system_prompt="Know it.")
    assert await repository.save_assistant(made, 3, worded) == 3
    last = await repository.assistant(user.id, made)
    assert last is not None
    assert (last.draft, last.revision) == (worded, 4)
    assert await repository.version_documents(found.version.id) == DRAFT.documents
    assert await repository.assistant_sampling(made) == {}


async def test_of_two_changes_at_once_the_second_is_refused(
    repository: Repository, user: User
) -> None:
    made = await repository.create_assistant(user.id, DRAFT)
    drafts = [replace(DRAFT, system_prompt=f"prompt {n}") for n in range(2)]
    results = await asyncio.gather(
        *(repository.save_assistant(made, 1, draft) for draft in drafts), return_exceptions=True
    )
    assert results[0] == 2
    assert isinstance(results[1], AssistantChanged)
    assert results[1].revision == 2
    found = await repository.assistant(user.id, made)
    assert found is not None
    assert found.version.system_prompt == "prompt 0"
    with pytest.raises(NotFound):
        await repository.save_assistant("0" * 32, 1, DRAFT)


async def test_who_sees_an_assistant(repository: Repository, user: User, chats: Chats) -> None:
    other = await repository.create_user("other")
    made = await repository.create_assistant(user.id, DRAFT)

    async def seen_by() -> list[bool]:
        seen = []
        for one in (user.id, other.id, None):
            listed = made in {found.id for found in await repository.assistants(one)}
            assert listed == (await repository.assistant(one, made) is not None)
            seen.append(listed)
        return seen

    assert await seen_by() == [True, False, False]
    assert await repository.publish_assistant(made, True)
    assert await seen_by() == [True, True, True]
    assert await repository.publish_assistant(made, False)
    assert await seen_by() == [True, False, False]
    assert await repository.own_assistants(user.id) == 1
    assert await repository.publish_assistant(made, True)
    assert await repository.delete_assistant(made)
    assert await seen_by() == [False, False, False]
    assert await repository.own_assistants(user.id) == 0
    assert not await repository.publish_assistant(made, True)
    with pytest.raises(NotFound):
        await repository.save_assistant(made, 1, DRAFT)


async def test_builtin_ones_cannot_be_changed(repository: Repository, chats: Chats) -> None:
    [builtin] = await repository.assistants(None)
    assert not await repository.delete_assistant(builtin.id)
    assert not await repository.publish_assistant(builtin.id, False)
    with pytest.raises(NotFound):
        await repository.save_assistant(builtin.id, 1, DRAFT)


async def test_a_deleted_one_keeps_what_its_chats_need_and_nothing_else(
    repository: Repository, user: User, db_path: Path
) -> None:
    made = await repository.create_assistant(user.id, DRAFT)
    used = await repository.assistant_version(made)
    prefix = await repository.prefix(used.id, "tokenizer", [1, 2])
    chat = await repository.create_chat(user.id, prefix.id, "kept")
    await repository.save_assistant(made, 1, replace(DRAFT, system_prompt="never used"))
    assert await repository.delete_assistant(made)
    found = await repository.chat(user.id, chat.id)
    assert found is not None
    assert (found.assistant_name, found.assistant_version) == ("Handbook", 1)
    assert await repository.version_documents(used.id) == DRAFT.documents
    assert (await repository.prefix_by_id(chat.prefix_id)).token_ids == [1, 2]
    with closing(sqlite3.connect(db_path)) as db:
        assert db.execute("SELECT system_prompt FROM assistant_version").fetchall() == [
            ("You know the handbook.",)
        ]
    unused = await repository.create_assistant(user.id, DRAFT)
    assert await repository.delete_assistant(unused)
    with closing(sqlite3.connect(db_path)) as db:
        assert db.execute("SELECT count(*) FROM assistant").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM assistant_document").fetchone() == (2,)


async def test_a_chat_moves_with_its_messages_as_they_are(
    repository: Repository, user: User, chats: Chats
) -> None:
    turn = await chats.start("hello")
    [assistant] = await repository.assistants(None)
    version = await repository.assistant_version(assistant.id)
    prefix = await repository.prefix(version.id, "other tokenizer", [30])
    with pytest.raises(TurnRunning):
        await repository.move_chat(user.id, turn.chat_id, prefix.id)
    await chats.answer(turn)
    before = await repository.path(turn.chat_id)
    other = await repository.create_user("other")
    assert not await repository.move_chat(other.id, turn.chat_id, prefix.id)
    assert await repository.move_chat(user.id, turn.chat_id, prefix.id)
    moved = await repository.chat(user.id, turn.chat_id)
    assert moved is not None
    assert moved.prefix_id == prefix.id
    assert await repository.path(turn.chat_id) == before
    [use] = await repository.version_uses(assistant.id)
    assert (use.number, use.chats) == (1, 1)


async def test_bytes_of_chats_are_those_of_their_messages(
    repository: Repository, user: User, chats: Chats, db_path: Path
) -> None:
    turn = await chats.start("vier Wörter: ä € 😀")
    await chats.answer(turn, "first ü")
    await chats.ask(turn.chat_id, turn.message_id, "again")
    other = await chats.start("x")
    await chats.answer(other)

    def in_fact() -> dict[str, tuple[int, int]]:
        with closing(sqlite3.connect(db_path)) as db:
            rows = db.execute("SELECT chat_id, text, token_ids FROM message").fetchall()
        found: dict[str, tuple[int, int]] = {}
        for chat_id, text, ids in rows:
            count, size = found.get(chat_id, (0, 0))
            found[chat_id] = (count + 1, size + len(text.encode()) + len(ids))
        return found

    async def counted() -> dict[str, tuple[int, int]]:
        uses = await repository.largest_chats(limit=10)
        return {use.chat_id: (use.messages, use.message_bytes) for use in uses}

    assert await counted() == in_fact()
    assert len(await repository.largest_chats(limit=1)) == 1
    totals = await repository.totals()
    assert (totals.users, totals.chats, totals.messages) == (1, 2, 6)
    assert totals.message_bytes == sum(size for _, size in in_fact().values())
    [of_user] = await repository.user_uses(limit=5)
    assert (of_user.chats, of_user.message_bytes) == (2, totals.message_bytes)
    assert of_user.last_seen_at is not None
    [of_assistant] = await repository.assistant_uses()
    assert (of_assistant.chats, of_assistant.versions) == (2, 1)
    assert of_assistant.message_bytes == totals.message_bytes
    assert of_assistant.prompt_bytes == len("You help.")
    owners = await repository.chat_owners([turn.chat_id, "gone"])
    assert owners == {turn.chat_id: (user.id, of_assistant.assistant_id)}

    assert await repository.delete_chat(user.id, other.chat_id)
    assert await repository.purge_deleted(repository._clock.now() + timedelta(hours=1)) == 1
    assert await counted() == in_fact()
    with closing(sqlite3.connect(db_path)) as db:
        assert db.execute("SELECT count(*) FROM chat_storage").fetchone() == (1,)


def _plan(db: sqlite3.Connection, query: Select[*tuple[object, ...]]) -> list[str]:
    text = query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {text}")]


async def test_no_page_of_the_operator_reads_all_messages(db_path: Path) -> None:
    """The plans, so that a lost index is noticed: no table but small ones is read in full."""
    with closing(sqlite3.connect(db_path)) as db:
        plans = {
            "largest": _plan(db, usage.largest_chats_query(50)),
            "users": _plan(db, usage.users_query(100)),
            "assistants": _plan(db, usage.assistants_query()),
        }
    for name, plan in plans.items():
        assert not any(re.search(r"\bmessage\b", line) for line in plan), (name, plan)
    assert "SEARCH chat USING INDEX sqlite_autoindex_chat_1 (id=?)" in plans["largest"]
    assert [line for line in plans["largest"] if line.startswith("SCAN")] == ["SCAN chat_storage"]
    lookups = "SEARCH chat_storage USING INDEX sqlite_autoindex_chat_storage_1 (chat_id=?)"
    assert any(line.startswith(lookups) for line in plans["users"])
    assert any(line.startswith(lookups) for line in plans["assistants"])


def test_upgrade_counts_what_is_there(tmp_path: Path) -> None:
    """From the schema before, with chats in it."""
    path = tmp_path / "rejoinder.db"
    _upgrade_to(path, "0005")
    now = "2026-03-01 10:00:00"
    with closing(sqlite3.connect(path)) as db:
        db.execute("INSERT INTO user (id, created_at) VALUES ('u', ?)", (now,))
        db.execute(
            "INSERT INTO assistant (id, owner_id, name, description, greeting, sampling, "
            "published, position, created_at) VALUES ('a', 'u', 'n', '', '', '{}', 0, 0, ?)",
            (now,),
        )
        db.execute("INSERT INTO assistant_version VALUES ('v', 'a', 1, 'prompt', ?)", (now,))
        db.execute("INSERT INTO prefix VALUES ('p', 'v', 't', x'01000000', ?)", (now,))
        db.execute(
            "INSERT INTO chat (id, user_id, prefix_id, title, created_at, updated_at) "
            "VALUES ('c', 'u', 'p', 't', ?, ?)",
            (now, now),
        )
        for message_id, text in (("m1", "hé"), ("m2", "x")):
            db.execute(
                "INSERT INTO message (id, chat_id, role, text, token_ids, status, created_at) "
                "VALUES (?, 'c', 'user', ?, x'0100000002000000', 'complete', ?)",
                (message_id, text, now),
            )
        db.commit()
    migrate.upgrade(path, tmp_path / "backups")
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT * FROM chat_storage").fetchall() == [("c", 2, 3 + 8 + 1 + 8)]
        assert db.execute("SELECT revision, deleted_at FROM assistant").fetchall() == [(1, None)]
        db.execute("UPDATE message SET text = 'longer' WHERE id = 'm2'")
        assert db.execute("SELECT bytes FROM chat_storage").fetchone() == (3 + 8 + 6 + 8,)

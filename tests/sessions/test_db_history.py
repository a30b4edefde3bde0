"""The list of chats with its pages, and chats that come from elsewhere."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.errors import NotFound
from sessions.history_records import NewChat, NewMessage
from sessions.records import ChatSummary
from sessions.repository import Repository

if TYPE_CHECKING:
    from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio

NUM_CHATS = 10_000
PAGE_S = 0.1  # generous: it takes a few milliseconds
START = datetime(2026, 1, 1, tzinfo=UTC)


async def _fill(repository: Repository, chats: Chats, count: int) -> None:
    """Chats of one user, some pinned, times in no order and many of them equal."""

    async def fill(db: AsyncConnection) -> None:
        await db.execute(
            insert(models.Chat),
            [
                {
                    "id": f"{number * 7919 % count:032x}",
                    "user_id": chats.user.id,
                    "prefix_id": chats.prefix.id,
                    "title": f"chat {number}",
                    "created_at": START,
                    "updated_at": START + timedelta(seconds=number * 31 % (count // 2)),
                    "pinned": number % 1000 == 7,
                    "deleted_at": START if number % 100 == 50 else None,
                }
                for number in range(count)
            ],
        )

    await repository._database.write(fill)


async def test_ten_thousand_chats_come_in_pages_by_the_index(
    repository: Repository, chats: Chats
) -> None:
    await _fill(repository, chats, NUM_CHATS)
    statements: list[tuple[str, Any]] = []

    @event.listens_for(repository._database._reader_engine.sync_engine, "before_cursor_execute")
    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.startswith("SELECT"):
            statements.append((statement, parameters))

    seen: list[ChatSummary] = []
    times = []
    after = None
    while True:
        begun = time.perf_counter()
        page = await repository.chats(chats.user.id, limit=50, after=after)
        times.append(time.perf_counter() - begun)
        if not page:
            break
        seen += page
        after = page[-1].cursor
        assert len(seen) <= NUM_CHATS, "no chat comes twice"
    assert len(seen) == len({chat.id for chat in seen}) == NUM_CHATS - NUM_CHATS // 100
    keys = [(chat.pinned, chat.updated_at, chat.id) for chat in seen]
    assert keys == sorted(keys, reverse=True)
    assert sum(chat.pinned for chat in seen) == 10
    assert median(times) < PAGE_S
    first, last = median(times[:20]), median(times[-20:])
    assert last < 5 * first + 0.005, "the last page costs what the first does"

    async with repository._database.read() as db:
        for statement, parameters in (statements[0], statements[-1]):
            plan = [
                row.detail
                for row in await db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]
            assert "ix_chat_listed" in plan[0], plan
            assert not any("SCAN" in step or "TEMP B-TREE" in step for step in plan), plan
    assert "(pinned,updated_at,id)<(?,?,?)" in plan[0], "the place is found, not counted"

    statements.clear()
    assert len(await repository.deleted_chats(chats.user.id)) == NUM_CHATS // 100
    async with repository._database.read() as db:
        [(statement, parameters)] = statements
        plan = [
            row.detail
            for row in await db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]
    assert "ix_chat_deleted_at" in plan[0], "only what is deleted is looked at"


async def test_pinned_chats_come_first(repository: Repository, chats: Chats) -> None:
    user_id = chats.user.id
    turns = [await chats.start(str(number)) for number in range(4)]
    assert await repository.pin_chat(user_id, turns[1].chat_id, True)
    stranger = await repository.create_user("stranger")
    assert not await repository.pin_chat(stranger.id, turns[2].chat_id, True)

    async def order() -> list[int]:
        ids = [turn.chat_id for turn in turns]
        return [ids.index(chat.id) for chat in await repository.chats(user_id)]

    assert await order() == [1, 3, 2, 0]
    chat = await repository.chat(user_id, turns[1].chat_id)
    assert chat is not None
    assert chat.pinned
    await repository.pin_chat(user_id, turns[0].chat_id, True)
    assert await order() == [1, 0, 3, 2]
    await repository.pin_chat(user_id, turns[1].chat_id, False)
    assert await order() == [0, 3, 2, 1]


def _message(parent: int | None, role: str, text: str, second: int) -> NewMessage:
    return NewMessage(
        parent=parent,
        role=role,  # type: ignore[arg-type]
        text=text,
        token_ids=list(text.encode()),
        status="complete",
        finish_reason=None,
        error=None,
        created_at=START + timedelta(seconds=second),
        completed_at=START + timedelta(seconds=second),
    )


NEW = NewChat(
    key="k" * 64,
    origin_id=None,
    title="From elsewhere",
    pinned=True,
    created_at=START,
    updated_at=START + timedelta(seconds=9),
    messages=[
        _message(None, "user", "question", 1),
        _message(0, "assistant", "one answer", 2),
        _message(0, "assistant", "another answer", 3),
        _message(1, "user", "more", 4),
        _message(3, "assistant", "much more", 5),
    ],
    active_leaf=4,
)


async def test_an_imported_chat_is_whole_and_comes_once(
    repository: Repository, chats: Chats
) -> None:
    user_id, prefix_id = chats.user.id, chats.prefix.id
    made = await repository.import_chat(user_id, prefix_id, NEW)
    assert made.how == "new"
    path = await repository.path(made.chat_id)
    assert [(one.role, one.text) for one in path] == [
        ("user", "question"),
        ("assistant", "one answer"),
        ("user", "more"),
        ("assistant", "much more"),
    ]
    assert path[3].token_ids == list(b"much more")
    branches = await repository.siblings(made.chat_id, [path[1].id])
    assert len(branches[path[1].id]) == 2
    chat = await repository.chat(user_id, made.chat_id)
    assert chat is not None
    assert (chat.title, chat.pinned, chat.updated_at) == (NEW.title, True, NEW.updated_at)
    turn = await chats.ask(made.chat_id, path[3].id, "and on")
    await chats.answer(turn)

    again = await repository.import_chat(user_id, prefix_id, NEW)
    assert (again.chat_id, again.how) == (made.chat_id, "known")
    assert len(await repository.path(made.chat_id)) == 6, "what was added stays"
    stranger = await repository.create_user("stranger")
    theirs = await repository.import_chat(stranger.id, prefix_id, NEW)
    assert (theirs.how, theirs.chat_id != made.chat_id) == ("new", True)

    await repository.delete_chat(user_id, made.chat_id)
    back = await repository.import_chat(user_id, prefix_id, NEW)
    assert (back.chat_id, back.how) == (made.chat_id, "restored")
    assert await repository.chat(user_id, made.chat_id) is not None


async def test_an_export_of_a_chat_that_is_here_makes_no_second_one(
    repository: Repository, chats: Chats
) -> None:
    turn = await chats.start()
    await chats.answer(turn)
    new = dataclasses.replace(NEW, origin_id=turn.chat_id)
    found = await repository.import_chat(chats.user.id, chats.prefix.id, new)
    assert (found.chat_id, found.how) == (turn.chat_id, "known")
    stranger = await repository.create_user("stranger")
    theirs = await repository.import_chat(stranger.id, chats.prefix.id, new)
    assert theirs.how == "new", "another user's chat is none of ours"
    await repository.delete_chat(chats.user.id, turn.chat_id)
    await repository.purge_deleted(datetime.now(UTC))
    after = await repository.import_chat(chats.user.id, chats.prefix.id, new)
    assert after.how == "new"


async def test_a_chat_that_cannot_be_stored_leaves_nothing(
    repository: Repository, chats: Chats
) -> None:
    with pytest.raises(NotFound, match="prefix"):
        await repository.import_chat(chats.user.id, "0" * 32, NEW)
    broken = dataclasses.replace(NEW, messages=[*NEW.messages, _message(9, "user", "x", 6)])
    with pytest.raises(IndexError):
        await repository.import_chat(chats.user.id, chats.prefix.id, broken)
    assert await repository.chats(chats.user.id) == []
    assert await repository.search_titles(chats.user.id, ["elsewhere"]) == []
    made = await repository.import_chat(chats.user.id, chats.prefix.id, NEW)
    assert made.how == "new"


async def test_an_export_holds_every_branch_and_no_tokens(
    repository: Repository, chats: Chats
) -> None:
    made = await repository.import_chat(chats.user.id, chats.prefix.id, NEW)
    chat = await repository.exported_chat(chats.user.id, made.chat_id)
    assert chat is not None
    assert [message.text for message in chat.messages] == [one.text for one in NEW.messages]
    ids = [message.id for message in chat.messages]
    assert [message.parent_id for message in chat.messages] == [
        None if one.parent is None else ids[one.parent] for one in NEW.messages
    ]
    assert chat.active_leaf_id == ids[NEW.active_leaf]
    assert (chat.assistant_name, chat.assistant_version) == ("Helper", 1)
    stranger = await repository.create_user("stranger")
    assert await repository.exported_chat(stranger.id, made.chat_id) is None
    assert await repository.chat_ids(stranger.id) == []

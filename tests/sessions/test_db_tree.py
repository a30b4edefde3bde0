"""A chat's messages are a tree: paths, branches, and the leaf that is shown."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from sessions import models
from sessions.database import Database
from sessions.errors import NotFound
from sessions.repository import Repository

if TYPE_CHECKING:
    from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio


async def test_branches_of_edits_and_retries(repository: Repository, chats: Chats) -> None:
    first = await chats.start("one")
    await chats.answer(first)
    chat_id = first.chat_id
    second = await chats.ask(chat_id, first.message_id, "two")
    await chats.answer(second)
    [again] = await repository.answer_again(chat_id, second.message_id, {})
    await chats.answer(again)
    edited = await chats.ask(chat_id, first.message_id, "two, edited")
    await chats.answer(edited)
    other_root = await chats.ask(chat_id, None, "one, edited")
    await chats.answer(other_root)

    async def ids(leaf_id: str | None = None) -> list[str]:
        return [message.id for message in await repository.path(chat_id, leaf_id)]

    assert await ids() == [other_root.user_message_id, other_root.message_id]
    begin = [first.user_message_id, first.message_id]
    assert await ids(second.message_id) == [*begin, second.user_message_id, second.message_id]
    assert await ids(again.message_id) == [*begin, second.user_message_id, again.message_id]
    assert await ids(edited.message_id) == [*begin, edited.user_message_id, edited.message_id]
    assert await ids(second.user_message_id) == [*begin, second.user_message_id]

    branches = await repository.siblings(chat_id, await ids(again.message_id))
    assert branches == {
        first.user_message_id: [first.user_message_id, other_root.user_message_id],
        first.message_id: [first.message_id],
        second.user_message_id: [second.user_message_id, edited.user_message_id],
        again.message_id: [second.message_id, again.message_id],
    }
    assert await repository.siblings(chat_id, ["0" * 32]) == {}

    assert await repository.select_branch(chat_id, second.user_message_id) == again.message_id
    assert await ids() == [*begin, second.user_message_id, again.message_id]
    assert await repository.select_branch(chat_id, first.user_message_id) == edited.message_id
    assert await repository.select_branch(chat_id, second.message_id) == second.message_id
    assert (await ids())[-1] == second.message_id
    chat = await repository.chat(chats.user.id, chat_id)
    assert chat is not None
    assert chat.active_leaf_id == second.message_id


async def test_messages_of_other_chats_are_not_there(repository: Repository, chats: Chats) -> None:
    ours, theirs = await chats.start("ours"), await chats.start("theirs")
    for leaf_id in (theirs.message_id, "0" * 32):
        with pytest.raises(NotFound, match="message"):
            await repository.path(ours.chat_id, leaf_id)
        with pytest.raises(NotFound, match="message"):
            await repository.select_branch(ours.chat_id, leaf_id)
        assert await repository.message(ours.chat_id, leaf_id) is None
        assert await repository.turn_of(ours.chat_id, leaf_id) is None
    assert await repository.message(ours.chat_id, ours.message_id) is not None
    with pytest.raises(NotFound, match="chat"):
        await repository.path("0" * 32)


async def test_chat_without_messages_has_an_empty_path(
    repository: Repository, chats: Chats
) -> None:
    chat = await repository.create_chat(chats.user.id, chats.prefix.id, "empty")
    assert await repository.path(chat.id) == []
    turn = await chats.ask(chat.id, None)
    assert len(await repository.path(chat.id)) == 2
    assert (await repository.running_turns(chat.id)) == [turn]


async def test_long_chat_is_read_by_its_keys_and_deleted_whole(
    database: Database, repository: Repository, chats: Chats
) -> None:
    chat = await repository.create_chat(chats.user.id, chats.prefix.id, "long")
    now = datetime.now(UTC)
    ids = [f"{number:032x}" for number in range(5000)]

    async def fill(db: AsyncConnection) -> None:
        await db.execute(
            insert(models.Message),
            [
                {
                    "id": message_id,
                    "chat_id": chat.id,
                    "parent_id": ids[number - 1] if number else None,
                    "role": "assistant" if number % 2 else "user",
                    "text": str(number),
                    "token_ids": [number],
                    "status": "complete",
                    "created_at": now,
                }
                for number, message_id in enumerate(ids)
            ],
        )
        await db.execute(
            update(models.Chat).where(models.Chat.id == chat.id).values(active_leaf_id=ids[-1])
        )

    await database.write(fill)
    statements: list[tuple[str, Any]] = []

    @event.listens_for(database._reader_engine.sync_engine, "before_cursor_execute")
    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        statements.append((statement, parameters))

    path = await repository.path(chat.id)
    assert [message.token_ids for message in path] == [[number] for number in range(5000)]
    recursive, parameters = next(one for one in statements if "RECURSIVE" in one[0])
    async with database.read() as db:
        plan = await db.exec_driver_sql(f"EXPLAIN QUERY PLAN {recursive}", parameters)
        steps = [row.detail for row in plan]
    assert any(step.startswith("SEARCH message") for step in steps)
    assert not [step for step in steps if step.startswith("SCAN message")]
    assert await repository.select_branch(chat.id, ids[0]) == ids[-1]
    # Longer than SQLite lets cascades recurse.
    assert await repository.delete_chat(chats.user.id, chat.id)
    assert await repository.purge_deleted(datetime.now(UTC)) == 1
    with pytest.raises(NotFound):
        await repository.path(chat.id)

"""Turns: one at a time in each chat, ended once, and mended after a crash."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.messages import TurnStats
from sessions import models
from sessions.database import Database
from sessions.errors import NotFound, StaleParent, TurnRunning
from sessions.records import Latency, Prefix, Progress, User
from sessions.repository import Repository

if TYPE_CHECKING:
    from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio


def _latency(**changed: object) -> Latency:
    """A record in which every value differs from every other."""
    values: dict[str, object] = {}
    for number, field in enumerate(dataclasses.fields(Latency), start=1):
        values[field.name] = {"str": field.name, "int": number}.get(str(field.type), number + 0.5)
    return Latency(**(values | changed))  # type: ignore[arg-type]


def test_columns_cover_the_engines_statistics() -> None:
    engine = {field.name: field for field in msgspec.structs.fields(TurnStats)}
    ours = {field.name for field in dataclasses.fields(Latency)}
    assert ours == set(engine) | {"server_ttft_ms"}
    table = models.TurnLatency.__table__
    assert {column.name for column in table.columns} == ours | {"turn_id"}
    for name, field in engine.items():
        optional = type(None) in getattr(field.type, "__args__", ())
        assert table.columns[name].nullable == optional, name


async def test_first_turn_is_stored_before_any_answer(
    repository: Repository, chats: Chats, user: User, prefix: Prefix
) -> None:
    sampling = {"temperature": 0.0, "stop": ["\n\n", "END"], "seed": 7}
    [turn] = await repository.start_chat(
        user.id,
        prefix.id,
        "A title",
        user_text=" the question\n",
        user_token_ids=[1, 49151, 2],
        sampling=sampling,
    )
    assert turn.running
    assert turn.sampling == sampling
    question, answer = await repository.path(turn.chat_id)
    assert (question.id, question.parent_id) == (turn.user_message_id, None)
    assert (question.role, question.status) == ("user", "complete")
    assert (question.text, question.token_ids) == (" the question\n", [1, 49151, 2])
    assert (answer.id, answer.parent_id) == (turn.message_id, question.id)
    assert (answer.role, answer.status, answer.completed_at) == ("assistant", "running", None)
    assert (answer.text, answer.token_ids) == ("", [])
    assert await repository.running_turns(turn.chat_id) == [turn]
    assert await repository.turn_of(turn.chat_id, answer.id) == turn
    [summary] = await repository.chats(user.id)
    assert (summary.title, summary.running) == ("A title", True)


async def test_finish_stores_answer_and_measurements(repository: Repository, chats: Chats) -> None:
    turn = await chats.start()
    latency = _latency(itl_p50_ms=None, server_ttft_ms=None)
    assert await repository.finish_turn(
        turn.id,
        status="stopped",
        finish_reason="cancelled",
        error=None,
        text="half an ans",
        token_ids=[5, 6],
        latency=latency,
    )
    answer = (await repository.path(turn.chat_id))[-1]
    assert (answer.status, answer.finish_reason) == ("stopped", "cancelled")
    assert (answer.text, answer.token_ids) == ("half an ans", [5, 6])
    assert answer.completed_at is not None
    ended = await repository.turn_of(turn.chat_id, turn.message_id)
    assert ended is not None
    assert not ended.running
    assert ended.ended_at == answer.completed_at
    assert await repository.running_turns(turn.chat_id) == []
    [record] = await repository.chat_latency(turn.chat_id)
    assert (record.turn_id, record.message_id) == (turn.id, turn.message_id)
    assert record.latency == latency


async def test_turn_ends_once(repository: Repository, chats: Chats) -> None:
    turn = await chats.start()
    await chats.answer(turn, "the answer")
    assert not await repository.finish_turn(
        turn.id,
        status="failed",
        finish_reason=None,
        error="too late",
        text="",
        token_ids=[],
        latency=_latency(),
    )
    await repository.save_progress(
        [Progress(message_id=turn.message_id, text="late", token_ids=[1])]
    )
    answer = (await repository.path(turn.chat_id))[-1]
    assert (answer.text, answer.status, answer.error) == ("the answer", "complete", None)
    assert await repository.chat_latency(turn.chat_id) == []


async def test_one_running_turn_of_a_chat(repository: Repository, chats: Chats) -> None:
    turn = await chats.start()
    with pytest.raises(TurnRunning):
        await chats.ask(turn.chat_id, turn.message_id)
    with pytest.raises(TurnRunning):
        await chats.ask(turn.chat_id, None)
    with pytest.raises(TurnRunning):
        await repository.answer_again(turn.chat_id, turn.message_id, {})
    assert len(await repository.path(turn.chat_id)) == 2
    other = await chats.start("in another chat")
    assert other.running
    await chats.answer(turn)
    assert (await chats.ask(turn.chat_id, turn.message_id)).running


async def test_one_running_turn_under_a_race(
    database: Database, repository: Repository, chats: Chats, db_path: Path
) -> None:
    first = await chats.start()
    await chats.answer(first)
    second_database = await Database.open(db_path)
    try:
        other = type(chats)(Repository(second_database), chats.user, chats.prefix)
        results = await asyncio.gather(
            *(chats.ask(first.chat_id, first.message_id, f"ours {n}") for n in range(10)),
            *(other.ask(first.chat_id, first.message_id, f"theirs {n}") for n in range(10)),
            return_exceptions=True,
        )
    finally:
        await second_database.close()
    assert sum(isinstance(result, TurnRunning) for result in results) == 19
    async with database.read() as db:
        count = await db.scalar(select(func.count()).select_from(models.Message))
    assert count == 4, "nothing is left of those that lost"


async def test_schema_holds_without_the_repository(database: Database, chats: Chats) -> None:
    first = await chats.start()
    await chats.answer(first)
    await chats.ask(first.chat_id, first.message_id)

    async def run_again(db: AsyncConnection) -> None:
        this_one = models.Turn.id == first.id
        await db.execute(update(models.Turn).where(this_one).values(running=first.id))

    with pytest.raises(IntegrityError, match="FOREIGN KEY"):
        await database.write(run_again)


async def test_parent_must_be_an_answer_of_the_chat(repository: Repository, chats: Chats) -> None:
    turn, other = await chats.start(), await chats.start("other")
    await chats.answer(turn)
    await chats.answer(other)
    for parent_id in (other.message_id, turn.user_message_id, "0" * 32):
        with pytest.raises(StaleParent):
            await chats.ask(turn.chat_id, parent_id)
    with pytest.raises(NotFound, match="chat"):
        await chats.ask("0" * 32, None)
    for message_id in (other.message_id, turn.user_message_id, "0" * 32):
        with pytest.raises(NotFound, match="answer"):
            await repository.answer_again(turn.chat_id, message_id, {})
    with pytest.raises(NotFound, match="user"):
        await repository.start_chat(
            "0" * 32, chats.prefix.id, "", user_text="", user_token_ids=[], sampling={}
        )
    with pytest.raises(NotFound, match="prefix"):
        await repository.create_chat(chats.user.id, "0" * 32, "")
    assert len(await repository.chats(chats.user.id)) == 2, "no chat is left of a failed start"


async def test_progress_is_all_or_nothing_and_goes_on(repository: Repository, chats: Chats) -> None:
    one, two = await chats.start("one"), await chats.start("two")
    await repository.save_progress(
        [
            Progress(message_id=one.message_id, text="  first\r\n", token_ids=[1]),
            Progress(message_id=two.message_id, text="second", token_ids=[2, 3]),
        ]
    )
    await repository.save_progress([])
    for turn, text, ids in ((one, "  first\r\n", [1]), (two, "second", [2, 3])):
        answer = (await repository.path(turn.chat_id))[-1]
        assert (answer.text, answer.token_ids, answer.status) == (text, ids, "running")
    with pytest.raises(StatementError, match="signed integer"):
        await repository.save_progress(
            [
                Progress(message_id=one.message_id, text="changed", token_ids=[1]),
                Progress(message_id=two.message_id, text="changed", token_ids=[1 << 40]),
            ]
        )
    assert (await repository.path(one.chat_id))[-1].text == "  first\r\n"


async def test_crash_leaves_interrupted_and_retryable_turns(
    database: Database, repository: Repository, chats: Chats, db_path: Path
) -> None:
    done, cut, begun = [await chats.start(text) for text in ("done", "cut", "begun")]
    await chats.answer(done)
    await repository.save_progress(
        [Progress(message_id=cut.message_id, text="so far", token_ids=[5, 6])]
    )
    await database.close()

    database = await Database.open(db_path)
    repository = Repository(database)
    try:
        interrupted = await repository.interrupt_running()
        assert {turn.id for turn in interrupted} == {cut.id, begun.id}
        assert not any(turn.running for turn in interrupted)
        assert all(turn.ended_at for turn in interrupted)
        assert await repository.interrupt_running() == []
        answer = (await repository.path(cut.chat_id))[-1]
        assert (answer.status, answer.text, answer.token_ids) == ("interrupted", "so far", [5, 6])
        assert answer.completed_at is not None
        assert (await repository.path(done.chat_id))[-1].status == "complete"
        [retried] = await repository.answer_again(cut.chat_id, cut.message_id, {"seed": 1})
        assert retried.user_message_id == cut.user_message_id
        assert [message.id for message in await repository.path(cut.chat_id)] == [
            cut.user_message_id,
            retried.message_id,
        ]
    finally:
        await database.close()

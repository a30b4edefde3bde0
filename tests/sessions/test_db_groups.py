"""Several answers at once, continued answers, the queued message, chats carried over."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, event
from sqlalchemy.pool import NullPool

from sessions import migrate
from sessions.database import Database
from sessions.errors import AlreadyQueued, NotFound, NotRunning, TurnRunning
from sessions.records import Carried, CarriedMessage, EndStatus, Turn
from sessions.repository import Repository
from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio


async def _end(repository: Repository, turn: Turn, status: EndStatus = "stopped") -> None:
    assert await repository.finish_turn(
        turn.id,
        status=status,
        finish_reason="cancelled",
        error=None,
        text="so far",
        token_ids=[7, 8],
        latency=None,
    )


async def test_a_group_holds_the_chat_until_its_last_turn_ended(
    repository: Repository, chats: Chats
) -> None:
    first = await chats.start()
    await chats.answer(first)
    turns = await repository.answer_again(first.chat_id, first.message_id, {}, candidates=3)
    assert len({turn.message_id for turn in turns}) == 3
    assert await repository.running_turns(first.chat_id) == turns
    path = await repository.path(first.chat_id)
    assert path[-1].id == turns[0].message_id, "the first one is the active leaf"
    group_id = path[-1].group_id
    assert group_id is not None
    group = await repository.candidates(first.chat_id, group_id)
    assert [(one.id, one.candidate) for one in group] == [
        (turn.message_id, number) for number, turn in enumerate(turns)
    ]
    branches = await repository.siblings(first.chat_id, [turns[2].message_id])
    assert branches[turns[2].message_id] == [
        first.message_id,
        *(turn.message_id for turn in turns),
    ]
    for turn in (turns[0], turns[2]):
        await _end(repository, turn)
        with pytest.raises(TurnRunning):
            await chats.ask(first.chat_id, first.message_id)
    assert await repository.running_turns(first.chat_id) == [turns[1]]
    await _end(repository, turns[1])
    assert await repository.running_turns(first.chat_id) == []
    assert await repository.select_branch(first.chat_id, turns[2].message_id) == turns[2].message_id
    assert (await chats.ask(first.chat_id, turns[2].message_id)).running


async def test_an_answer_alone_has_no_group(repository: Repository, chats: Chats) -> None:
    turn = await chats.start()
    assert (await repository.path(turn.chat_id))[-1].group_id is None


async def test_a_crash_frees_the_chat_of_a_group(repository: Repository, chats: Chats) -> None:
    first = await chats.start()
    await chats.answer(first)
    turns = await repository.answer_again(first.chat_id, first.message_id, {}, candidates=2)
    interrupted = await repository.interrupt_running()
    assert {turn.id for turn in interrupted} == {turn.id for turn in turns}
    assert await repository.running_turns(first.chat_id) == []
    assert (await chats.ask(first.chat_id, first.message_id)).running


async def test_an_answer_goes_on_in_a_further_turn(repository: Repository, chats: Chats) -> None:
    first = await chats.start()
    await _end(repository, first)
    again = await repository.continue_turn(first.chat_id, first.message_id, {"seed": 3})
    assert (again.message_id, again.user_message_id) == (first.message_id, first.user_message_id)
    assert again.id != first.id
    answer = (await repository.path(first.chat_id))[-1]
    assert (answer.status, answer.text, answer.token_ids) == ("running", "so far", [7, 8])
    assert (answer.finish_reason, answer.completed_at) == (None, None)
    assert await repository.turn_of(first.chat_id, first.message_id) == again
    with pytest.raises(TurnRunning):
        await repository.continue_turn(first.chat_id, first.message_id, {})
    assert await repository.finish_turn(
        again.id,
        status="complete",
        finish_reason="eos",
        error=None,
        text="so far so good",
        token_ids=[7, 8, 9],
        latency=None,
    )
    answer = (await repository.path(first.chat_id))[-1]
    assert (answer.status, answer.text) == ("complete", "so far so good")
    for message_id in (first.user_message_id, "0" * 32):
        with pytest.raises(NotFound, match="answer"):
            await repository.continue_turn(first.chat_id, message_id, {})


async def test_one_message_is_queued_and_survives_a_restart(
    database: Database, repository: Repository, chats: Chats, db_path: Path
) -> None:
    turn = await chats.start()
    results = await asyncio.gather(
        *(repository.queue_message(turn.chat_id, f"then {n}") for n in range(5)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, AlreadyQueued) for result in results) == 4
    await database.close()
    database = await Database.open(db_path)
    repository = Repository(database)
    try:
        assert await repository.chats_with_queued() == [turn.chat_id]
        kept = await repository.queued_message(turn.chat_id)
        assert kept is not None
        assert (kept.text, kept.problem) == ("then 0", None)
        await repository.set_queue_problem(turn.chat_id, "It was interrupted.")
        assert await repository.chats_with_queued() == []
        await repository.interrupt_running()
        sent = await repository.start_queued(
            turn.chat_id,
            parent_id=turn.message_id,
            user_text="then 0",
            user_token_ids=[1],
            sampling={},
        )
        assert [one.text for one in await repository.path(turn.chat_id)][2:] == ["then 0", ""]
        assert await repository.queued_message(turn.chat_id) is None
        await _end(repository, sent)
        with pytest.raises(NotRunning):
            await repository.queue_message(turn.chat_id, "too late")
        with pytest.raises(NotFound):
            await repository.queue_message("0" * 32, "nowhere")
    finally:
        await database.close()


async def test_a_withdrawn_message_is_not_sent(repository: Repository, chats: Chats) -> None:
    turn = await chats.start()
    await repository.queue_message(turn.chat_id, "second thoughts")
    await _end(repository, turn)
    assert await repository.withdraw_queued(turn.chat_id) == "second thoughts"
    assert await repository.withdraw_queued(turn.chat_id) is None
    with pytest.raises(NotFound, match="queued"):
        await repository.start_queued(
            turn.chat_id,
            parent_id=turn.message_id,
            user_text="second thoughts",
            user_token_ids=[1],
            sampling={},
        )
    assert len(await repository.path(turn.chat_id)) == 2


async def test_a_queued_message_goes_with_its_chat(repository: Repository, chats: Chats) -> None:
    turn = await chats.start()
    await repository.queue_message(turn.chat_id, "never sent")
    assert await repository.delete_chat(chats.user.id, turn.chat_id)
    assert await repository.chat_by_id(turn.chat_id) is None
    assert await repository.purge_deleted(datetime.now(UTC) + timedelta(hours=1)) == 1
    assert await repository.queued_message(turn.chat_id) is None


async def test_a_chat_carried_over_begins_with_those_messages(
    repository: Repository, chats: Chats
) -> None:
    old = await chats.start()
    messages = [
        CarriedMessage(role="user", text="what", token_ids=[1, 2]),
        CarriedMessage(role="assistant", text="that", token_ids=[3]),
    ]
    carried = Carried(chat_id=old.chat_id, exchanges=1, of=4)
    chat_id = await repository.carry_over(
        chats.user.id, chats.prefix.id, "went on", messages, carried
    )
    path = await repository.path(chat_id)
    assert [(one.role, one.text, one.token_ids) for one in path] == [
        (one.role, one.text, one.token_ids) for one in messages
    ]
    assert [one.parent_id for one in path] == [None, path[0].id]
    chat = await repository.chat(chats.user.id, chat_id)
    assert chat is not None
    assert chat.carried == carried
    assert chat.active_leaf_id == path[-1].id
    assert (await chats.ask(chat_id, path[-1].id)).running
    other = await repository.chat(chats.user.id, old.chat_id)
    assert other is not None
    assert other.carried is None
    empty = await repository.carry_over(chats.user.id, chats.prefix.id, "anew", [], carried)
    assert await repository.path(empty) == []


async def test_upgrade_keeps_every_turn(tmp_path: Path) -> None:
    """A database of the first schema, with a turn that ran and one that had ended."""
    path = tmp_path / "old.db"
    _upgrade_to(path, "0001")
    with closing(sqlite3.connect(path)) as db:
        now = "2026-01-01 00:00:00.000000"
        db.execute("INSERT INTO user VALUES ('u', ?)", (now,))
        db.execute(
            "INSERT INTO assistant VALUES ('a', 's', NULL, 'n', '', '', '{}', 1, 0, ?)", (now,)
        )
        db.execute("INSERT INTO assistant_version VALUES ('v', 'a', 1, '', ?)", (now,))
        db.execute("INSERT INTO prefix VALUES ('p', 'v', 'd', x'', ?)", (now,))
        for chat in ("c1", "c2"):
            db.execute("INSERT INTO chat VALUES (?, 'u', 'p', 't', NULL, ?, ?)", (chat, now, now))
            for role in ("user", "assistant"):
                db.execute(
                    "INSERT INTO message VALUES (?, ?, NULL, ?, 'text', x'', 'complete', NULL,"
                    " NULL, ?, ?)",
                    (f"{chat}{role}", chat, role, now, now),
                )
            db.execute(
                "INSERT INTO turn VALUES (?, ?, ?, ?, ?, '{\"seed\": 1}', ?, NULL)",
                (f"t{chat}", chat, f"{chat}user", f"{chat}assistant", chat == "c1" or None, now),
            )
        columns = [row[1] for row in db.execute("PRAGMA table_info(turn_latency)")]
        values = ["tc2" if name == "turn_id" else 1 for name in columns]
        marks = ", ".join("?" * len(columns))
        db.execute(f"INSERT INTO turn_latency VALUES ({marks})", values)
        db.commit()
    backup = migrate.upgrade(path, tmp_path / "backups")
    assert backup is not None
    with closing(sqlite3.connect(path)) as db:
        assert db.execute(
            "SELECT id, chat_id, user_message_id, message_id, running, sampling FROM turn"
            " ORDER BY id"
        ).fetchall() == [
            ("tc1", "c1", "c1user", "c1assistant", "tc1", '{"seed": 1}'),
            ("tc2", "c2", "c2user", "c2assistant", None, '{"seed": 1}'),
        ]
        assert db.execute("SELECT id, running_group_id FROM chat ORDER BY id").fetchall() == [
            ("c1", "tc1"),
            ("c2", None),
        ]
        assert db.execute("SELECT DISTINCT group_id, candidate FROM message").fetchall() == [
            (None, 0)
        ]
        assert db.execute("SELECT turn_id FROM turn_latency").fetchall() == [("tc2",)]
    database = await Database.open(path)
    repository = Repository(database)
    try:
        assert [turn.id for turn in await repository.interrupt_running()] == ["tc1"]
        assert await repository.running_turns("c1") == []
    finally:
        await database.close()


def _upgrade_to(path: Path, revision: str) -> None:
    db_engine = create_engine(f"sqlite:///{path}", poolclass=NullPool)

    @event.listens_for(db_engine, "connect")
    def _(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None

    config = migrate._config()
    with db_engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        connection.commit()
    db_engine.dispose()
    assert migrate.current(path) == revision

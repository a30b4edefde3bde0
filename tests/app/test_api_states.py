"""Hidden chats of stateless calls: found by ids, bounded, kept an hour, over restarts."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api import states
from app.api.states import States
from app.settings import Settings
from engine.memory.sequence import common_length
from sessions.database import Database
from sessions.records import ApiState
from sessions.repository import Repository
from tests.app.api_client import chat_body, make_key, raw_client
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import serving

pytestmark = pytest.mark.anyio


@dataclass
class MemoryStore:
    rows: dict[str, ApiState] = field(default_factory=dict)
    forgotten: int = 0

    async def api_states(self) -> list[ApiState]:
        return list(self.rows.values())

    async def keep_api_state(self, state: ApiState, *, replaces: str | None) -> None:
        self.rows.pop(replaces or "", None)
        self.rows[state.id] = state

    async def drop_api_states(self, state_ids: Sequence[str]) -> None:
        for state_id in state_ids:
            self.rows.pop(state_id, None)

    async def drop_unused_api_prefixes(self) -> None:
        pass

    async def drop_api_states_before(self, used_before: float) -> None:
        self.rows = {k: row for k, row in self.rows.items() if row.used_at >= used_before}

    async def forget_deleted(self) -> None:
        self.forgotten += 1


def made() -> tuple[States, MemoryStore, FakeEngine]:
    store, engine = MemoryStore(), FakeEngine()
    return States(store, engine, store.forget_deleted), store, engine


def call(
    known: States, ids: list[int], answer: list[int], *, user: str = "u", **options: Any
) -> states.Found:
    """One stateless call from its beginning to its end."""
    stored = options.get("stored", True)
    found = known.find(user, [1, 2], ids, stored=stored)
    known.use(found.chat_id)
    known.release(found.chat_id)
    complete = options.get("complete", True)
    known.keep(user, found, [1, 2], ids, [(answer, complete)], stored=stored)
    return found


async def test_only_what_agrees_is_used() -> None:
    known, _, _ = made()
    first = call(known, list(range(100)), [7, 8])
    again = known.find("u", [1, 2], [*range(100), 7, 8, 9], stored=True)
    assert (again.chat_id, again.agreed, again.computed) == (first.chat_id, 102, 102)
    edited = known.find("u", [1, 2], [*range(70), 5, 5, 5], stored=True)
    assert (edited.chat_id, edited.agreed) == (first.chat_id, 70)
    assert known.find("u", [1, 2], [*range(63), 5, 5], stored=True).agreed == 0, "under a page"
    assert known.find("u", [1, 3], list(range(100)), stored=True).agreed == 0, "other prefix"
    assert known.find("v", [1, 2], list(range(100)), stored=True).agreed == 0, "other user"
    assert known.find("u", [1, 2], list(range(100)), stored=False).agreed == 0, "memory only"


async def test_an_answer_that_was_cut_has_one_token_without_state() -> None:
    known, _, _ = made()
    call(known, list(range(100)), [7, 8], complete=False)
    again = known.find("u", [1, 2], [*range(100), 7, 8, 9], stored=True)
    assert (again.agreed, again.computed) == (102, 101)


async def test_short_chats_are_gone_on_with_too() -> None:
    known, _, _ = made()
    first = call(known, [5, 6], [7])
    assert known.find("u", [1, 2], [5, 6, 7, 8], stored=True).chat_id == first.chat_id


async def test_a_chat_that_goes_on_has_one_state() -> None:
    known, store, _ = made()
    ids = list(range(100))
    for turn in range(5):
        call(known, ids, [turn])
        ids = [*ids, turn, 50]
    await asyncio.sleep(0)
    await known.close()
    assert len(store.rows) == 1
    [row] = store.rows.values()
    assert row.token_ids == ids[:-1]


async def test_the_number_is_bounded_and_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(states, "KEPT_PER_USER", 3)
    known, store, engine = made()
    chats = [call(known, [n] * 100, [n]).chat_id for n in range(5)]
    memory = [call(known, [n] * 100, [n], user="v", stored=False).chat_id for n in range(5)]
    await known.close()
    kept = {row.chat_id for row in store.rows.values()}
    assert kept == set(chats[2:])
    assert store.forgotten == 2
    assert sorted(engine.forgotten) == sorted(memory[:2])


async def test_all_users_together_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KEPT_TOKENS", 350)
    known, store, _ = made()
    chats = [call(known, [n] * 100, [n], user=f"user {n}").chat_id for n in range(5)]
    await known.close()
    assert {row.chat_id for row in store.rows.values()} == set(chats[2:])


async def test_running_chats_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KEPT_PER_USER", 1)
    known, store, _ = made()
    first = call(known, [1] * 100, [1])
    known.use(first.chat_id)
    call(known, [2] * 100, [1])
    await known.tidy(time.time() + 10)
    await known.close()
    assert {row.chat_id for row in store.rows.values()} == {first.chat_id}


async def test_after_an_hour_they_are_gone() -> None:
    known, store, _ = made()
    call(known, [1] * 100, [1])
    await known.tidy(time.time() - states.KEPT_S)
    assert known.find("u", [1, 2], [1] * 100, stored=True).agreed == 100
    await known.tidy(time.time() + 1)
    await known.close()
    assert known.find("u", [1, 2], [1] * 100, stored=True).agreed == 0
    assert store.rows == {}
    assert store.forgotten == 1


@settings(max_examples=200)
@given(
    a=st.lists(st.integers(0, 2), max_size=40),
    b=st.lists(st.integers(0, 2), max_size=40),
)
def test_common_beginnings(a: list[int], b: list[int]) -> None:
    from array import array

    assert states.common_length(array("i", a), array("i", b)) == common_length(a, b)


async def test_over_a_restart_and_then_forgotten(
    web_settings: Settings, fake_engine: FakeEngine
) -> None:
    fake_engine.auto = "Yes."
    body = chat_body("A question that is long enough to be worth finding again, surely.")
    async with serving(web_settings, fake_engine) as server:
        key = await make_key(server)
        async with raw_client(server, key) as http:
            assert (await http.post("/chat/completions", json=body)).status_code == 200
    async with serving(web_settings, fake_engine) as server, raw_client(server, key) as http:
        assert (await http.post("/chat/completions", json=body)).status_code == 200
        first, second = (turn.submit for turn in fake_engine.turns)
        assert second.chat_id == first.chat_id
        assert second.history_ids == first.new_ids[:-1], "the last token has to be run"
        await asyncio.sleep(0.1)
        await server.app.state.services.api.states.tidy(time.time() + 1)
        assert fake_engine.forgotten == [first.chat_id]
        with closing(sqlite3.connect(web_settings.database_path)) as db:
            assert db.execute("SELECT count(*) FROM api_state").fetchone() == (0,)


async def test_unused_system_prompts_go(web_settings: Settings, tmp_path: Path) -> None:
    database = await Database.open(web_settings.database_path)
    repository = Repository(database)
    key = await repository.create_api_key("x", "h", "h")
    await repository.api_prefix(key.user_id, "k", "An old prompt", "digest", [1])
    await repository.drop_unused_api_prefixes()
    now = repository._clock.now()

    def prompts() -> list[Any]:
        with closing(sqlite3.connect(web_settings.database_path)) as db:
            return db.execute("SELECT system_prompt FROM assistant_version").fetchall()

    assert prompts() == [("An old prompt",)], "it may be on its way into a chat"
    repository._clock._last = now + timedelta(days=2)
    await repository.drop_unused_api_prefixes()
    assert prompts() == []
    await database.close()

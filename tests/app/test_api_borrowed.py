"""Stateless calls go on from the user's own chats, which are none the wiser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.borrowed import longest_path
from app.settings import Settings
from engine.memory.sequence import common_length
from engine.messages import Submit
from sessions.answer_records import TreeMessage
from sessions.path_digests import digests
from sessions.queries.belongings import hand_over
from tests.app.api_client import MODEL, make_key, openai_client, raw_client
from tests.app.fake_engine import FakeEngine
from tests.app.talk import ended, exchange, messages, new_chat, rows, until
from tests.app.web_client import Browser, Server

pytestmark = pytest.mark.anyio

QUESTION = "How does one find the way through a wood in the dark of night? " * 4
ANSWER = "By listening to the water, and by going slowly. " * 3
Said = list[dict[str, str]]


class Caller:
    """The API as the browser's user calls it."""

    def __init__(self, http: httpx.AsyncClient, engine: FakeEngine, system: str) -> None:
        self.http = http
        self.engine = engine
        self.system = system

    async def ask(self, *said: str, **options: Any) -> Submit:
        """Questions and answers in turn, the last one to be answered; what the engine was given."""
        roles = ("user", "assistant")
        chat: Said = [{"role": "system", "content": self.system}]
        chat += [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
        auto, self.engine.auto = self.engine.auto, "Fine."
        body = {"model": MODEL, "messages": chat, **options}
        response = await self.http.post("/chat/completions", json=body)
        self.engine.auto = auto
        assert response.status_code == 200, response.text
        return self.engine.turns[-1].submit


@pytest.fixture
async def chat_id(browser: Browser, server: Server) -> str:
    return await new_chat(browser, server, QUESTION, ANSWER)


@pytest.fixture
async def caller(server: Server, chat_id: str, web_settings: Settings) -> AsyncIterator[Caller]:
    repository = server.app.state.repository
    [(user_id,)] = rows(web_settings, "SELECT user_id FROM chat WHERE id = ?", chat_id)
    chat = await repository.chat(user_id, chat_id)
    system = (await repository.assistant_version(chat.assistant_id)).system_prompt
    async with raw_client(server, await make_key(server, user_id=user_id)) as http:
        yield Caller(http, server.engine, system)


def path_ids(submit: Submit) -> list[int]:
    return [*submit.prefix_ids, *submit.history_ids, *submit.new_ids]


def everything(web_settings: Settings) -> list[Any]:
    """What the database has of chats."""
    tables = ("chat", "message", "turn", "path_mark", "api_state")
    return [rows(web_settings, f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables]


async def test_a_browser_chat_is_gone_on_from_and_not_changed(
    caller: Caller, browser: Browser, server: Server, chat_id: str, web_settings: Settings
) -> None:
    [turn] = server.engine.turns
    before, page = everything(web_settings), await ended(browser, chat_id)
    submit = await caller.ask(QUESTION, ANSWER, "And in the snow?", n=2)
    assert submit.chat_id == chat_id
    assert submit.prefix_ids == turn.submit.prefix_ids
    assert submit.prefix_scope == turn.submit.prefix_scope
    known = [*turn.submit.new_ids, *ANSWER.encode()]
    assert submit.history_ids == known
    assert submit.history_computed == len(known)
    assert not submit.saves
    assert everything(web_settings) == before
    assert messages(await ended(browser, chat_id)) == messages(page)
    await exchange(browser, server, chat_id, "And by day?", "With ease.")
    assert server.engine.turns[-1].submit.history_ids == known


async def test_not_another_users(server: Server, caller: Caller, chat_id: str) -> None:
    async with raw_client(server, await make_key(server)) as http:
        other = Caller(http, server.engine, caller.system)
        submit = await other.ask(QUESTION, ANSWER, "And in the snow?")
    assert submit.chat_id != chat_id
    assert submit.history_ids == []
    assert submit.saves


async def test_the_chats_that_a_guest_took_along(
    caller: Caller, server: Server, chat_id: str, web_settings: Settings
) -> None:
    repository = server.app.state.repository
    await caller.ask(QUESTION, ANSWER, "And in the snow?")  # the marks are there
    [(guest_id,)] = rows(web_settings, "SELECT user_id FROM chat WHERE id = ?", chat_id)
    user = await repository.create_user("hash of another")
    before = rows(web_settings, "SELECT message_id FROM path_mark ORDER BY 1")
    await repository._database.write(lambda db: hand_over(db, guest_id, user.id))
    assert rows(web_settings, "SELECT message_id FROM path_mark ORDER BY 1") == before
    async with raw_client(server, await make_key(server, user_id=user.id)) as http:
        submit = await Caller(http, server.engine, caller.system).ask(QUESTION, ANSWER, "By day?")
    assert submit.chat_id == chat_id
    assert submit.history_computed > 0


async def test_any_branch_is_found(
    caller: Caller, browser: Browser, server: Server, chat_id: str
) -> None:
    page = await ended(browser, chat_id)
    question_id = messages(page)[0][0]
    other = QUESTION.replace("night", "noon")
    number = len(server.engine.turns)
    response = await browser.post(f"/messages/{question_id}/edit", {"edited": other})
    assert response.status_code == 303
    turn = await server.engine.next_turn(number)
    turn.say("By the sun. " * 10)
    turn.end()
    await ended(browser, chat_id)
    for question, answer in ((QUESTION, ANSWER), (other, "By the sun. " * 10)):
        submit = await caller.ask(question, answer, "Then?")
        assert submit.chat_id == chat_id
        text = bytes(one for one in submit.history_ids if one < 256).decode()
        assert question in text
        assert text.endswith(answer)


async def test_it_agrees_inside_a_message_too(caller: Caller, chat_id: str) -> None:
    """The same document with another question, all in one message."""
    submit = await caller.ask(QUESTION[:-20] + "What does this text say?")
    assert submit.chat_id == chat_id
    assert submit.history_computed == len(submit.history_ids)
    text = bytes(one for one in submit.history_ids if one < 256).decode()
    assert text.endswith(QUESTION[:-20])


async def test_ids_that_the_text_would_not_have_are_not_used(
    caller: Caller, browser: Browser, server: Server
) -> None:
    """An answer whose text is tokenised otherwise than the model wrote it."""
    number = len(server.engine.turns)
    chat_id = await browser.new_chat(QUESTION.upper())
    turn = await server.engine.next_turn(number)
    turn.push_ids([1, 2, 3], "Quite so.")
    turn.end()
    await ended(browser, chat_id)
    submit = await caller.ask(QUESTION.upper(), "Quite so.", "Why?")
    assert submit.chat_id == chat_id
    assert submit.history_ids == turn.submit.new_ids
    assert b"Quite so." in bytes(one for one in submit.new_ids if one < 256)


async def test_the_longest_wins_and_its_own_state_among_them(
    caller: Caller, browser: Browser, server: Server, chat_id: str
) -> None:
    longer = await new_chat(browser, server, QUESTION, ANSWER)
    await exchange(browser, server, longer, "And then?", "Then home. " * 9)
    newest = await new_chat(browser, server, QUESTION, "No idea.")
    assert (await caller.ask(QUESTION, ANSWER, "And then?", "Then home. " * 9, "Ah.")).chat_id == (
        longer
    )
    assert (await caller.ask(QUESTION, "No idea.", "Ah.")).chat_id == newest
    # Less than half of the prompt: it gets a state of its own, which is saved, and found again.
    own = await caller.ask(QUESTION, ANSWER, "x" * 2000)
    assert own.chat_id not in (chat_id, longer, newest)
    assert own.saves
    again = await caller.ask(QUESTION, ANSWER, "x" * 2000, "Fine.", "More.")
    assert again.chat_id == own.chat_id
    assert again.saves


async def test_a_deleted_chat_is_not_used(caller: Caller, browser: Browser, chat_id: str) -> None:
    assert (await browser.post(f"/chats/{chat_id}/delete")).status_code == 303
    assert (await caller.ask(QUESTION, ANSWER, "And?")).chat_id != chat_id


async def test_what_is_not_to_be_stored_goes_on_from_it_too(
    caller: Caller, chat_id: str, web_settings: Settings
) -> None:
    before = everything(web_settings)
    submit = await caller.ask(QUESTION, ANSWER, "And?", store=False)
    assert submit.chat_id == chat_id
    assert not submit.saves
    assert everything(web_settings) == before


async def test_a_kept_response_is_gone_on_from(server: Server, fake_engine: FakeEngine) -> None:
    fake_engine.auto = ANSWER
    key = await make_key(server)
    async with openai_client(server, key) as client:
        first = await client.responses.create(model=MODEL, instructions="Be wise.", input=QUESTION)
        aside = await client.responses.create(
            model=MODEL,
            instructions="Be wise.",
            input="In the snow?",
            previous_response_id=first.id,
            store=False,
        )
        assert aside.output_text == ANSWER
    async with raw_client(server, key) as http:
        submit = await Caller(http, fake_engine, "Be wise.").ask(QUESTION, ANSWER, "In the snow?")
    kept, unstored, _ = (turn.submit for turn in fake_engine.turns)
    known = [*kept.new_ids, *ANSWER.encode()]
    for one in (unstored, submit):
        assert one.chat_id == kept.chat_id
        assert one.prefix_scope == kept.prefix_scope
        assert one.history_ids == known
        assert one.history_computed == len(known)
        assert not one.saves
    assert path_ids(unstored) == path_ids(submit)


async def test_neither_waits_for_the_other(
    caller: Caller, browser: Browser, server: Server, chat_id: str
) -> None:
    """A call while the chat answers, and a message while a call is answered: no 409."""
    number = len(server.engine.turns)
    assert (await browser.say(chat_id, "And?")).status_code == 303
    running = await server.engine.next_turn(number)
    assert (await caller.ask(QUESTION, ANSWER, "Both?")).chat_id == chat_id
    running.end()
    await ended(browser, chat_id)


async def test_a_chat_that_is_purged_meanwhile_is_an_error(
    caller: Caller, server: Server, chat_id: str
) -> None:
    """The engine lets go of what runs on a chat that it is told to forget."""
    number = len(server.engine.turns)
    calling = asyncio.create_task(
        caller.http.post(
            "/chat/completions",
            json={
                "model": MODEL,
                "messages": [
                    {"role": "system", "content": caller.system},
                    {"role": "user", "content": QUESTION},
                ],
            },
        )
    )
    turn = await server.engine.next_turn(number)
    assert turn.submit.chat_id == chat_id
    turn.say("Half an")
    turn.end("cancelled")
    response = await calling
    assert response.status_code == 409
    assert "deleted" in response.json()["error"]["message"]


async def test_marks_go_with_their_chat(
    server: Server, chat_id: str, web_settings: Settings
) -> None:
    def marks() -> int:
        return len(rows(web_settings, "SELECT * FROM path_mark"))

    await until(lambda: marks() > 0)
    [(user_id,)] = rows(web_settings, "SELECT user_id FROM chat")
    repository = server.app.state.repository
    await repository.delete_chat(user_id, chat_id)
    await repository.purge_deleted(datetime.now(UTC))
    assert marks() == 0


@st.composite
def trees(draw: st.DrawFn) -> list[TreeMessage]:
    made: list[TreeMessage] = []
    for number in range(draw(st.integers(0, 9))):
        parent = draw(st.integers(-1, number - 1))
        made.append(
            TreeMessage(
                id=str(number),
                parent_id=None if parent < 0 else str(parent),
                role="user",
                status="complete",
                finish_reason=None,
                token_ids=draw(st.lists(st.integers(0, 1), max_size=4)),
            )
        )
    return made


@given(tree=trees(), ids=st.lists(st.integers(0, 1), max_size=16))
def test_the_longest_path_of_a_tree(tree: list[TreeMessage], ids: list[int]) -> None:
    by_id = {one.id: one for one in tree}

    def whole(one: TreeMessage | None) -> list[int]:
        return [] if one is None else [*whole(by_id.get(one.parent_id or "")), *one.token_ids]

    path, agreed = longest_path(tree, ids)
    assert agreed == max((common_length(whole(one), ids) for one in tree), default=0)
    assert common_length([token for one in path for token in one.token_ids], ids) == agreed
    assert [one.parent_id for one in path[1:]] == [one.id for one in path[:-1]]


def test_digests_are_of_one_user_and_one_prefix() -> None:
    ids = list(range(300))
    found = digests("u", [1, 2], ids)
    assert list(found.values()) == [64, 128, 256]
    assert digests("u", [1, 2], [*ids[:200], 9]) == dict(list(found.items())[:2])
    for other in (digests("v", [1, 2], ids), digests("u", [1], [2, *ids]), digests("u", [], ids)):
        assert not found.keys() & other.keys()

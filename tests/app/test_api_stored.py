"""Responses and conversations by the official client, over the real routes and database."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from app.settings import Settings
from tests.app.api_client import MODEL, make_key, openai_client, raw_client
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import Server

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(server, await make_key(server)) as client:
        yield client


def text_of(item: Any) -> str:
    """The text of an item, whose declared type covers all that OpenAI's models can say."""
    text: str = item.content[0].text
    return text


def path_ids(submit: Any) -> list[int]:
    return [*submit.prefix_ids, *submit.history_ids, *submit.new_ids]


async def test_a_response_goes_on_from_the_one_before(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    fake_engine.auto = "Paris."
    first = await client.responses.create(
        model=MODEL, instructions="Be short.", input="Capital of France?", metadata={"a": "b"}
    )
    assert first.output_text == "Paris."
    assert first.status == "completed"
    assert first.metadata == {"a": "b"}
    assert first.usage is not None
    assert first.usage.input_tokens_details.cached_tokens == 1012 + 64 + 1204
    fake_engine.auto = "Two million."
    second = await client.responses.create(
        model=MODEL,
        instructions="Be short.",
        input="How many people?",
        previous_response_id=first.id,
    )
    assert second.previous_response_id == first.id
    before, after = (turn.submit for turn in fake_engine.turns)
    assert after.chat_id == before.chat_id
    assert after.history_ids == [*before.new_ids, *b"Paris."]
    assert after.history_computed == len(after.history_ids)
    assert after.prefix_ids == before.prefix_ids
    read = await client.responses.retrieve(second.id)
    assert read.output_text == "Two million."
    items = await client.responses.input_items.list(second.id)
    assert [text_of(item) for item in items.data] == ["How many people?"]


async def test_two_responses_go_on_from_the_same_one(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    fake_engine.auto = "Yes."
    first = await client.responses.create(model=MODEL, input="One?")
    for text in ("Left?", "Right?"):
        await client.responses.create(model=MODEL, input=text, previous_response_id=first.id)
    left, right = (turn.submit for turn in fake_engine.turns[1:])
    assert left.history_ids == right.history_ids
    assert bytes(t for t in right.new_ids if t < 256).endswith(b"Right?\nassistant\n")


async def test_other_instructions_begin_another_chat_with_all_that_was_said(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    fake_engine.auto = "Yes."
    first = await client.responses.create(model=MODEL, input="One?", instructions="Be short.")
    await client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)
    before, after = (turn.submit for turn in fake_engine.turns)
    assert after.chat_id != before.chat_id
    assert after.history_ids == []
    text = bytes(t for t in path_ids(after) if t < 256).decode()
    assert "Be short." not in text, "instructions are not carried over"
    assert text.index("One?") < text.index("Yes.") < text.index("Two?")


async def test_stream_of_a_response(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    fake_engine.auto = "Grüße 😀"
    async with client.responses.stream(model=MODEL, input="Hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Grüße 😀"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert (await client.responses.retrieve(final.id)).output_text == "Grüße 😀"


async def test_cut_by_the_token_limit_is_incomplete(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    call = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    asked = asyncio.ensure_future(call)
    turn = await fake_engine.next_turn(0)
    assert turn.submit.sampling.max_tokens == 1
    turn.say("W")
    turn.end("length")
    answer = await asked
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    # The last sampled token has no K/V yet.
    fake_engine.auto = "!"
    await client.responses.create(model=MODEL, input="On", previous_response_id=answer.id)
    submit = fake_engine.turns[1].submit
    assert submit.history_computed == len(submit.history_ids) - 1


async def test_not_stored_cannot_be_gone_on_with(
    client: AsyncOpenAI, fake_engine: FakeEngine, web_settings: Settings
) -> None:
    fake_engine.auto = "No."
    answer = await client.responses.create(model=MODEL, input="An unheard-of thing?", store=False)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"
    assert not fake_engine.turns[0].submit.saves
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        assert b"unheard" not in b"".join(str(row).encode() for row in db.iterdump())


async def test_another_user_sees_nothing(
    server: Server, client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    fake_engine.auto = "Yes."
    answer = await client.responses.create(model=MODEL, input="One?")
    conversation = await client.conversations.create()
    async with openai_client(server, await make_key(server)) as other:
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
        with pytest.raises(openai.NotFoundError):
            await other.conversations.retrieve(conversation.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=MODEL, input="x", conversation=conversation.id)


async def test_deleted_response_takes_its_chat_along(
    server: Server, client: AsyncOpenAI, fake_engine: FakeEngine, web_settings: Settings
) -> None:
    fake_engine.auto = "Yes."
    first = await client.responses.create(model=MODEL, input="One?")
    second = await client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)

    def deleted() -> list[Any]:
        with closing(sqlite3.connect(web_settings.database_path)) as db:
            return db.execute("SELECT deleted_at IS NOT NULL, origin FROM chat").fetchall()

    await client.responses.delete(first.id)
    assert deleted() == [(0, "api")]
    assert (await client.responses.retrieve(second.id)).output_text == "Yes."
    await client.responses.delete(second.id)
    assert deleted() == [(1, "api")]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    repository = server.app.state.repository
    assert await repository.purge_deleted(datetime.now(UTC) + timedelta(days=1)) == 1
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        for table in ("chat", "message", "turn", "api_response"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


async def test_conversation(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    conversation = await client.conversations.create(
        metadata={"topic": "x"},
        items=[
            {"type": "message", "role": "developer", "content": "Be short."},
            {"type": "message", "role": "user", "content": "My name is Zoë."},
        ],
    )
    fake_engine.auto = "Noted."
    answer = await client.responses.create(
        model=MODEL, conversation=conversation.id, input="Please note it."
    )
    assert answer.conversation is not None
    assert answer.conversation.id == conversation.id
    fake_engine.auto = "Zoë."
    await client.responses.create(model=MODEL, conversation=conversation.id, input="My name?")
    before, after = (turn.submit for turn in fake_engine.turns)
    assert b"Be short." in bytes(t for t in before.prefix_ids if t < 256)
    assert after.chat_id == before.chat_id
    assert after.history_ids == [*before.new_ids, *b"Noted."]
    items = await client.conversations.items.list(conversation.id, order="asc")
    texts = [text_of(item) async for item in items]
    assert texts == [
        "Be short.",
        "My name is Zoë.",
        "Please note it.",
        "Noted.",
        "My name?",
        "Zoë.",
    ]
    changed = await client.conversations.update(conversation.id, metadata={"topic": "y"})
    assert changed.metadata == {"topic": "y"}
    deleted = await client.conversations.delete(conversation.id)
    assert deleted.deleted
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(conversation.id)


async def test_items_are_paged_added_and_removed(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    conversation = await client.conversations.create()
    added = await client.conversations.items.create(
        conversation.id,
        items=[{"role": "user", "content": f"No. {n}", "type": "message"} for n in range(5)],
    )
    assert len(added.data) == 5
    page = await client.conversations.items.list(conversation.id, limit=2)
    texts = [text_of(item) async for item in page]
    assert texts == ["No. 4", "No. 3", "No. 2", "No. 1", "No. 0"], "the client asks for all pages"
    fake_engine.auto = "Yes."
    await client.responses.create(model=MODEL, conversation=conversation.id, input="Go")
    items = await client.conversations.items.list(conversation.id, order="asc")
    everything = [item async for item in items]
    await client.conversations.items.delete(everything[1].id, conversation_id=conversation.id)  # type: ignore[arg-type]
    await client.responses.create(model=MODEL, conversation=conversation.id, input="On")
    text = bytes(t for t in path_ids(fake_engine.turns[1].submit) if t < 256).decode()
    assert "No. 1" not in text
    assert text.index("No. 0") < text.index("No. 2") < text.index("Yes.") < text.index("On")
    left = await client.conversations.items.list(conversation.id, order="asc")
    first = left.data[0]
    read = await client.conversations.items.retrieve(first.id, conversation_id=conversation.id)  # type: ignore[arg-type]
    assert text_of(read) == "No. 0"


async def test_two_messages_at_once_give_one_reply_each(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    conversation = await client.conversations.create()
    call = client.responses.create
    first = asyncio.ensure_future(
        call(model=MODEL, conversation=conversation.id, input="One", stream=False)
    )
    turn = await fake_engine.next_turn(0)
    with pytest.raises(openai.ConflictError) as caught:
        await call(model=MODEL, conversation=conversation.id, input="Two")
    assert caught.value.code == "conversation_locked"
    turn.say("1")
    turn.end()
    assert (await first).output_text == "1"
    fake_engine.auto = "2"
    both = await asyncio.gather(
        *(call(model=MODEL, conversation=conversation.id, input=text) for text in ("A", "B")),
        return_exceptions=True,
    )
    answered = [one for one in both if not isinstance(one, BaseException)]
    refused = [one for one in both if isinstance(one, BaseException)]
    assert all(isinstance(one, openai.ConflictError) for one in refused)
    assert len(answered) >= 1
    items = await client.conversations.items.list(conversation.id, order="asc")
    roles = [item.role async for item in items]  # type: ignore[union-attr]
    assert roles == ["user", "assistant"] * (1 + len(answered))


async def test_client_that_leaves_keeps_the_real_figures(
    server: Server, fake_engine: FakeEngine, web_settings: Settings
) -> None:
    async with raw_client(server, await make_key(server)) as http:
        body = {"model": MODEL, "input": "Hi", "stream": True}
        asked = asyncio.ensure_future(http.post("/responses", json=body))
        turn = await fake_engine.next_turn(0)
        turn.say("Half")
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.wait([asked])
        async with asyncio.timeout(1):
            await turn.stream.wait_ended()
        await asyncio.sleep(0.1)
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        [(status, text)] = db.execute("SELECT status, text FROM message WHERE role='assistant'")
        [(tokens,)] = db.execute("SELECT tokens_out FROM turn_latency")
    assert (status, text, tokens) == ("stopped", "Half", 3)


async def test_responses_do_not_show_in_the_browsers_list(
    server: Server, fake_engine: FakeEngine, web_settings: Settings
) -> None:
    fake_engine.auto = "Yes."
    async with server.browser() as browser:
        await browser.new_chat("In the browser")
        with closing(sqlite3.connect(web_settings.database_path)) as db:
            [(user_id,)] = db.execute("SELECT user_id FROM chat")
        async with openai_client(server, await make_key(server, user_id=user_id)) as client:
            await client.responses.create(model=MODEL, input="Over the API")
        page = (await browser.get("/")).text
        assert "In the browser" in page
        assert "Over the API" not in page
        with closing(sqlite3.connect(web_settings.database_path)) as db:
            [(chat_id,)] = db.execute("SELECT id FROM chat WHERE origin = 'api'")
        assert (await browser.get(f"/chats/{chat_id}")).status_code == 404


async def test_structured_output_is_parsed(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    fake_engine.auto = '{"name": "Zoë", "age": 41}'
    answer = await client.responses.parse(model=MODEL, input="Who?", text_format=Person)
    assert answer.output_parsed == Person(name="Zoë", age=41)
    assert '"age"' in fake_engine.turns[0].submit.grammar
    whole = await client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Who?"}], response_format=Person
    )
    assert whole.choices[0].message.parsed == Person(name="Zoë", age=41)


async def test_warm_goes_by_name_too(server: Server, fake_engine: FakeEngine) -> None:
    fake_engine.auto = "Yes."
    key = await make_key(server)
    async with openai_client(server, key) as client, raw_client(server, key) as http:
        answer = await client.responses.create(model=MODEL, input="Hi")
        body = {"model": MODEL, "previous_response_id": answer.id}
        warmed = (await http.post("/warm", json=body)).json()
    submit = fake_engine.turns[0].submit
    assert fake_engine.warmed[0].chat_id == submit.chat_id
    assert fake_engine.warmed[0].history_ids == [*submit.new_ids, *b"Yes."]
    assert warmed["known_tokens"] == len(path_ids(submit)) + 4


async def test_cut_off_by_a_crash_is_a_failed_response(
    server: Server, client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    created = await anext(stream)
    assert created.type == "response.created"
    await fake_engine.next_turn(0)
    assert (await client.responses.retrieve(created.response.id)).status == "in_progress"
    turn = fake_engine.turns[0]
    turn.say("Half an ans")
    while (await anext(stream)).type != "response.output_text.delta":
        pass
    await server.app.state.services.api.save_progress()  # as it does every second
    with pytest.raises(openai.ConflictError):
        await client.responses.create(
            model=MODEL, input="On", previous_response_id=created.response.id
        )
    await server.app.state.repository.interrupt_running()  # as the next start does
    read = await client.responses.retrieve(created.response.id)
    assert read.status == "failed"
    assert read.error is not None
    assert read.output_text == "Half an ans"
    [item] = read.output
    assert item.type == "message"
    assert item.status == "incomplete"
    assert read.usage is not None
    assert read.usage.input_tokens == len(path_ids(turn.submit))
    assert read.usage.output_tokens == len("Half an ans")
    told = read.usage.input_tokens_details.to_dict()
    assert told["cached_tokens"] is None, "unknown is not 0"
    await stream.close()
    fake_engine.auto = "Yes."
    again = await client.responses.create(
        model=MODEL, input="On", previous_response_id=created.response.id
    )
    assert again.output_text == "Yes."
    before = [*turn.submit.new_ids, *b"Half an ans"]
    assert fake_engine.turns[-1].submit.history_ids == before


async def test_partial_counts_when_the_engine_dies(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    turn = await fake_engine.next_turn(0)
    turn.say("Half")
    turn.fail("engine_died", "The engine stopped.")
    told = [one async for one in stream]
    assert told[-1].type == "response.failed"
    [response_id] = {one.response.id for one in told if one.type == "response.created"}
    for read in (told[-1].response, await client.responses.retrieve(response_id)):
        assert read.status == "failed"
        assert read.output_text == "Half"
        assert read.usage is not None
        assert read.usage.input_tokens == len(path_ids(turn.submit))
        assert read.usage.output_tokens == 4

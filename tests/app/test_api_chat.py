"""Chat completions as the official client asks for them, over the real routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from app.api import generation
from engine.messages import Delta, TokenLogprobs
from tests.app.api_client import MODEL, chat_body, make_key, openai_client, raw_client
from tests.app.fake_engine import FakeEngine, FakeTurn
from tests.app.web_client import Server

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(server, await make_key(server)) as client:
        yield client


def ask(client: AsyncOpenAI, text: str = "Hello", **options: object) -> asyncio.Task[object]:
    messages = [{"role": "user", "content": text}]
    call = client.chat.completions.create(model=MODEL, messages=messages, **options)  # type: ignore[call-overload]
    return asyncio.ensure_future(call)


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_whole_answer_with_usage(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    asked = ask(client, "Hi", temperature=0, max_tokens=9, seed=5, stop=["END"])
    turn = await fake_engine.next_turn(0)
    assert turn.submit.sampling.max_tokens == 9
    assert turn.submit.sampling.seed == 5
    assert turn.submit.sampling.stop == ("END",)
    turn.say("Good ")
    turn.say("day")
    turn.end("length", prefix_computed_tokens=0)
    answer = await asked
    choice = answer.choices[0]  # type: ignore[attr-defined]
    assert choice.message.content == "Good day"
    assert choice.finish_reason == "length"
    usage = answer.usage  # type: ignore[attr-defined]
    assert usage.prompt_tokens == 2300
    assert usage.completion_tokens == 3
    assert usage.prompt_tokens_details.cached_tokens == 1012 + 64 + 1204


async def test_stream_with_usage(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    asked = ask(client, stream=True, stream_options={"include_usage": True})
    stream = await asked
    turn = await fake_engine.next_turn(0)
    for part in ("Gr", "üß", " dich 😀"):
        turn.say(part)
    turn.end()
    chunks = [chunk async for chunk in stream]  # type: ignore[attr-defined]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Grüß dich 😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 3
    assert len({c.id for c in chunks}) == 1


async def test_several_answers_are_candidates_of_one_chat(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    asked = ask(client, n=3)
    turns = [await fake_engine.next_turn(n) for n in range(3)]
    assert [turn.submit.candidate for turn in turns] == [0, 1, 2]
    assert len({turn.submit.chat_id for turn in turns}) == 1
    for number, turn in enumerate(turns):
        turn.say(f"No. {number}")
        turn.end()
    answer = await asked
    found = [choice.message.content for choice in answer.choices]  # type: ignore[attr-defined]
    assert found == ["No. 0", "No. 1", "No. 2"]
    assert answer.usage.completion_tokens == 9  # type: ignore[attr-defined]


def say_scored(turn: FakeTurn, text: str) -> None:
    ids = list(text.encode())
    scores = [TokenLogprobs(-0.5, [(token, -0.5), (66, -float("inf"))]) for token in ids]
    event = Delta(request_id=turn.stream.request_id, token_ids=ids, text=text, logprobs=scores)
    turn.stream.push(event)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(client: AsyncOpenAI, fake_engine: FakeEngine, stream: bool) -> None:
    asked = ask(client, logprobs=True, top_logprobs=2, stream=stream)
    turn = await fake_engine.next_turn(0)
    assert turn.submit.top_logprobs == 2
    say_scored(turn, "é")
    turn.end()
    answer = await asked
    if stream:
        chunks = [chunk async for chunk in answer]  # type: ignore[attr-defined]
        found = next(c.choices[0].logprobs for c in chunks if c.choices[0].logprobs).content
    else:
        found = answer.choices[0].logprobs.content  # type: ignore[attr-defined]
    assert [token.bytes for token in found] == [[0xC3], [0xA9]]
    assert found[0].logprob == -0.5
    assert found[0].top_logprobs[1].token == "B"
    assert found[0].top_logprobs[1].logprob == -9999.0


async def test_structured_output_asks_the_engine_for_a_grammar(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = ask(client, response_format=wanted)
    turn = await fake_engine.next_turn(0)
    assert json.loads(turn.submit.grammar)["grammars"][0]["json_schema"]["properties"]
    turn.say('{"a": 1}')
    turn.end()
    await asked
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(
            client,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            },
        )
    assert caught.value.param == "response_format.json_schema.schema"


async def test_second_call_goes_on_from_the_first(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "One"},
    ]
    fake_engine.auto = "First answer"
    call = client.chat.completions.create
    await call(model=MODEL, messages=messages)
    messages += [
        {"role": "assistant", "content": "First answer"},
        {"role": "user", "content": "Two"},
    ]
    await call(model=MODEL, messages=messages)
    first, second = (turn.submit for turn in fake_engine.turns)
    assert second.chat_id == first.chat_id
    assert second.prefix_ids == first.prefix_ids
    assert second.prefix_scope == first.prefix_scope
    before = [*first.history_ids, *first.new_ids, *b"First answer"]
    # The template's end of turn is what the model said last; the fake engine's turns end with it.
    assert second.history_ids == before
    assert second.history_computed == len(before)
    assert bytes(t for t in second.new_ids if t < 256).endswith(b"Two\nassistant\n")


async def test_another_users_state_is_not_found(server: Server, fake_engine: FakeEngine) -> None:
    fake_engine.auto = "Answer"
    for _ in range(2):
        async with openai_client(server, await make_key(server)) as client:
            await ask(client, "The same question of two users, long enough to be worth it.")
    first, second = (turn.submit for turn in fake_engine.turns)
    assert second.history_ids == []
    assert second.chat_id != first.chat_id
    assert second.prefix_scope != first.prefix_scope


async def test_not_stored_stays_in_memory(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    fake_engine.auto = "Answer"
    messages: list[Any] = [
        {"role": "system", "content": "Keep it."},
        {"role": "user", "content": "A private question that is long enough to be found again"},
    ]
    for store in (False, True, False):
        await client.chat.completions.create(model=MODEL, messages=messages, store=store)
    memory, stored, again = (turn.submit for turn in fake_engine.turns)
    assert not memory.saves
    assert memory.prefix_ids == [], "a prefix would go to disk"
    assert stored.saves
    assert stored.prefix_ids != []
    assert again.chat_id == memory.chat_id


async def test_heartbeats_during_a_long_prefill(
    client: AsyncOpenAI, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "HEARTBEAT_S", 0.05)
    stream = await ask(client, stream=True)
    turn = await fake_engine.next_turn(0)
    await asyncio.sleep(0.3)
    turn.say("At last")
    turn.end()
    text = "".join([c.choices[0].delta.content or "" async for c in stream])  # type: ignore[attr-defined]
    assert text == "At last"


async def test_headers_and_a_comment_go_out_at_once(
    server: Server, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "HEARTBEAT_S", 0.05)
    async with (
        raw_client(server, await make_key(server)) as http,
        http.stream("POST", "/chat/completions", json=chat_body(stream=True)) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        lines = response.aiter_lines()
        assert await anext(lines) == ": still here"
        beats = 0
        while beats < 3:
            beats += (await anext(lines)).startswith(":")
    turn = await fake_engine.next_turn(0)
    async with asyncio.timeout(1):
        await turn.stream.wait_ended()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_frees_its_request(
    server: Server, fake_engine: FakeEngine, stream: bool
) -> None:
    async with raw_client(server, await make_key(server)) as http:
        asked = asyncio.ensure_future(http.post("/chat/completions", json=chat_body(stream=stream)))
        turn = await fake_engine.next_turn(0)
        turn.say("Half an ans")
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.wait([asked])
    async with asyncio.timeout(1):
        await turn.stream.wait_ended()
    assert fake_engine.cancelled == [turn.submit.request_id]
    await asyncio.sleep(0.05)
    assert server.app.state.services.api.queue.running == 0
    assert fake_engine.places.in_use == 0


async def test_engine_failure_in_a_stream_is_an_error_event(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    stream = await ask(client, stream=True)
    turn = await fake_engine.next_turn(0)
    turn.say("Half")
    turn.fail("engine_died", "The engine stopped.")
    with pytest.raises(openai.APIError, match="started again"):
        [chunk async for chunk in stream]  # type: ignore[attr-defined]


async def test_engine_failure_of_a_whole_answer(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    asked = ask(client, n=2)
    turns = [await fake_engine.next_turn(n) for n in range(2)]
    turns[1].fail("internal", "A page was lost.")
    with pytest.raises(openai.InternalServerError, match="A page was lost"):
        await asked
    assert turns[0].stream.ended, "one without the other is no answer"


async def test_engine_away(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    fake_engine.alive = False
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(client)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_longer_than_the_context(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, "x" * 30_001)
    assert caught.value.code == "context_length_exceeded"
    assert "30000" in str(caught.value)
    assert "300" in str(caught.value)
    assert fake_engine.turns == []


async def test_tools_need_a_template_that_has_them(client: AsyncOpenAI) -> None:
    tool = {"type": "function", "function": {"name": "clock"}}
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, tools=[tool])
    assert caught.value.param == "tools"
    assert "template" in str(caught.value)


async def test_tokenize_and_warm(server: Server, fake_engine: FakeEngine) -> None:
    fake_engine.auto = "Answer"
    async with raw_client(server, await make_key(server)) as http:
        text = {"model": MODEL, "prompt": "a<|im_end|>"}
        tokens = (await http.post("/tokenize", json=text)).json()
        assert tokens["tokens"] == list(b"a<|im_end|>"), "text never becomes a control token"
        assert tokens["count"] == 11
        body = chat_body("A question")
        counted = (await http.post("/tokenize", json=body)).json()
        assert (await http.post("/warm", json=body)).json()["known_tokens"] == 0
        assert fake_engine.warmed == []
        await http.post("/chat/completions", json=body)
        submit = fake_engine.turns[0].submit
        assert counted["tokens"] == [*submit.prefix_ids, *submit.new_ids]
        warmed = (await http.post("/warm", json=body)).json()
        assert warmed["known_tokens"] == len(submit.new_ids)
        assert fake_engine.warmed[0].chat_id == submit.chat_id

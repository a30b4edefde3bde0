"""Tools, where the model's template has them: shown, called, answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from app.api.tool_calls import ToolCallReader
from app.settings import Settings
from tests.app.api_client import MODEL, make_key, openai_client
from tests.app.fake_engine import FakeEngine, write_tokenizer
from tests.app.web_client import serving

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call them inside <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
SAID = 'Let me see.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'


@pytest.fixture
async def client(
    web_settings: Settings, fake_engine: FakeEngine, tmp_path: Path
) -> AsyncIterator[AsyncOpenAI]:
    model = write_tokenizer(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    settings = web_settings.model_copy(update={"model": str(model)})
    async with (
        serving(settings, fake_engine) as server,
        openai_client(server, await make_key(server)) as client,
    ):
        yield client


async def test_a_tool_is_called_and_answers(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    fake_engine.auto = SAID
    messages: list[Any] = [{"role": "user", "content": "What time is it?"}]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=[CLOCK])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "clock"
    assert json.loads(call.function.arguments) == {"zone": "UTC"}
    shown = bytes(t for t in fake_engine.turns[0].submit.prefix_ids if t < 256).decode()
    assert json.dumps(CLOCK["function"]["name"]) in shown

    fake_engine.auto = "It is noon."
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "12:00"},
    ]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=[CLOCK])
    assert answer.choices[0].finish_reason == "stop"
    first, second = (turn.submit for turn in fake_engine.turns)
    assert second.chat_id == first.chat_id
    text = bytes(t for t in [*second.history_ids, *second.new_ids] if t < 256).decode()
    assert '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>' in text
    assert "tool\n12:00" in text


async def test_calls_in_a_stream(client: AsyncOpenAI, fake_engine: FakeEngine) -> None:
    messages: list[Any] = [{"role": "user", "content": "What time is it?"}]
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=[CLOCK], stream=True
    )
    turn = await fake_engine.next_turn(0)
    for character in SAID:
        turn.say(character)
    turn.end()
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "Let me see.\n"
    [call] = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert call.function is not None
    assert call.function.name == "clock"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_no_tools_are_shown_when_none_may_be_called(
    client: AsyncOpenAI, fake_engine: FakeEngine
) -> None:
    fake_engine.auto = SAID
    messages: list[Any] = [{"role": "user", "content": "What time is it?"}]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=[CLOCK], tool_choice="none"
    )
    assert answer.choices[0].message.content == SAID, "it is text then"
    assert fake_engine.turns[0].submit.prefix_ids == []


pieces = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "a"}', "{", "<tool", "_call>", " ", "text", "\n"]
    ),
    max_size=12,
)


@given(pieces=pieces, cuts=st.lists(st.integers(1, 9), max_size=40))
def test_how_a_text_is_cut_does_not_matter(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)

    def read(parts: list[str]) -> tuple[str, list[str]]:
        reader = ToolCallReader()
        shown = "".join(reader.push(part) for part in parts) + reader.flush()
        return shown.strip(), [call.function.name for call in reader.calls]

    parts, rest = [], text
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    whole, calls = read([text])
    cut_shown, cut_calls = read([*parts, rest])
    assert calls == cut_calls
    assert whole.split() == cut_shown.split()
    if "</tool_call>" not in text:
        assert whole == text.strip() or calls

"""Whatever is sent: an error that names the field, or a right answer; never a failure."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.turn_stream import Places
from tests.app.api_client import MODEL, make_key
from tests.app.fake_engine import CONTROL_TOKENS, FakeEngine
from tests.app.web_client import serving, settings_for

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass
class Target:
    """A server in a thread of its own, with an engine that answers everything."""

    http: httpx.Client
    engine: FakeEngine

    def post(self, path: str, body: Any) -> httpx.Response:
        """JSON with its escapes, so that lone surrogates arrive as such."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.engine.turns.clear()
        answer = self.http.post(path, content=data, headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, (answer.text, data[:2000])
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert error["type"] == "invalid_request_error"
        return answer


@pytest.fixture(scope="module")
def target(web_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    home = tmp_path_factory.mktemp("hostile")
    (home / "rejoinder.db").write_bytes((web_template / "rejoinder.db").read_bytes())
    engine = FakeEngine(auto="Yes.", places=Places(64))
    ready, ended = threading.Event(), threading.Event()
    found: list[str] = []

    async def run() -> None:
        async with serving(settings_for(home, web_template / "model"), engine) as server:
            found.extend([server.url, await make_key(server)])
            ready.set()
            while not ended.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    url, key = found
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"{url}/v1", headers=headers, timeout=30) as http:
        yield Target(http, engine)
        answer = http.post("/chat/completions", json=CHAT)  # nothing is wedged
        assert answer.json()["choices"][0]["message"]["content"] == "Yes."
    ended.set()
    thread.join(20)


CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Hi"}
BODIES = {
    "/chat/completions": CHAT,
    "/responses": RESPONSE,
    "/conversations": {"metadata": {}},
    "/tokenize": CHAT,
    "/warm": CHAT,
}

texts = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("\0\ud800\udfff\r\n\u2028\ufeff"),
    ),
    max_size=30,
)
numbers = st.one_of(
    st.integers(),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, -0.0, 5e-324]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
CHAT_FIELDS = (
    "model", "messages", "stream", "stream_options", "temperature", "top_p", "n", "seed", "stop",
    "max_tokens", "max_completion_tokens", "presence_penalty", "frequency_penalty", "logprobs",
    "top_logprobs", "logit_bias", "response_format", "tools", "tool_choice", "store", "metadata",
    "user", "parallel_tool_calls", "service_tier", "modalities", "reasoning_effort", "audio",
)  # fmt: skip
RESPONSE_FIELDS = (
    "model", "input", "instructions", "previous_response_id", "conversation", "store", "stream",
    "temperature", "top_p", "max_output_tokens", "text", "include", "top_logprobs", "metadata",
    "tools", "tool_choice", "reasoning", "background", "truncation", "prompt", "user",
)  # fmt: skip


def check_named(answer: httpx.Response, field: str) -> None:
    """An error names the field that was wrong, or what is in it."""
    if answer.status_code >= 400:
        param = answer.json()["error"]["param"]
        assert param is not None, answer.text
        assert param == field or param.startswith((f"{field}.", f"{field}[")), answer.text


@few
@given(field=st.sampled_from(CHAT_FIELDS), value=anything)
def test_any_value_of_a_chat_field(target: Target, field: str, value: Any) -> None:
    check_named(target.post("/chat/completions", {**CHAT, field: value}), field)


@few
@given(field=st.sampled_from(RESPONSE_FIELDS), value=anything)
def test_any_value_of_a_response_field(target: Target, field: str, value: Any) -> None:
    check_named(target.post("/responses", {**RESPONSE, field: value}), field)


@few
@given(path=st.sampled_from(sorted(BODIES)), name=texts, value=anything)
def test_unknown_fields_are_named(target: Target, path: str, name: str, value: Any) -> None:
    if name not in (*CHAT_FIELDS, *RESPONSE_FIELDS, "items", "prompt"):
        answer = target.post(path, {**BODIES[path], name: value})
        assert answer.status_code == 400
        known = name.encode("utf-8", "replace").decode()
        if name and "`" not in name:
            assert answer.json()["error"]["param"] is not None
            assert known in answer.json()["error"]["param"] or max(name) >= "\ud800"


@few
@given(path=st.sampled_from(sorted(BODIES)), data=st.data())
def test_damaged_bodies(target: Target, path: str, data: st.DataObject) -> None:
    whole = json.dumps(BODIES[path], ensure_ascii=False).encode(
        data.draw(st.sampled_from(["utf-8", "utf-16", "utf-32", "latin-1", "utf-8-sig"]))
    )
    cut = data.draw(st.integers(0, len(whole)))
    target.post(path, whole[:cut] + data.draw(st.binary(max_size=8)) + whole[cut + 1 :])


@pytest.mark.parametrize("depth", [10, 500, 5_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting(target: Target, depth: int, opening: str, closing: str) -> None:
    deep = opening * depth + "1" + closing * depth
    chat = json.dumps(CHAT)[:-1]
    schema = f'{{"type":"object","properties":{{"x":{deep}}}}}'
    wanted = f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'
    for body in (
        deep,
        f'{chat},"prediction":{deep}}}',
        f'{chat},"response_format":{wanted}}}',
        f'{chat},"tool_choice":{deep}}}',
    ):
        answer = target.post("/chat/completions", body.encode())
        assert answer.status_code == 400 or depth < 5_000


messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "developer", "user"]), "content": texts}
        ),
        st.fixed_dictionaries(
            {
                "role": st.just("assistant"),
                "content": st.one_of(st.none(), texts),
                "refusal": st.one_of(st.none(), texts),
            }
        ),
        st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "tool_call_id": texts}),
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant"]),
                "content": st.lists(
                    st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3
                ),
            }
        ),
    ),
    max_size=8,
)


@settings(few, max_examples=80)
@given(messages=messages)
def test_roles_in_any_order(target: Target, messages: list[dict[str, Any]]) -> None:
    answer = target.post("/chat/completions", {**CHAT, "messages": messages})
    if answer.status_code >= 400:
        check_named(answer, "messages")
        return
    [turn] = target.engine.turns
    ids = [*turn.submit.prefix_ids, *turn.submit.history_ids, *turn.submit.new_ids]
    starts = len(messages) + 1  # the answer's
    assert ids.count(CONTROL_TOKENS["<|im_start|>"]) == starts
    assert turn.submit.new_ids


@few
@given(
    words=st.lists(
        st.sampled_from([*CONTROL_TOKENS, "system", "\n", "assistant", " ", "Obey", "</s>"]),
        min_size=1,
        max_size=12,
    ),
    role=st.sampled_from(["user", "system", "assistant"]),
)
def test_control_tokens_in_texts_stay_text(target: Target, words: list[str], role: str) -> None:
    text = "".join(words)
    said = [{"role": role, "content": text}, {"role": "user", "content": text}]
    answer = target.post("/chat/completions", {**CHAT, "messages": said})
    assert answer.status_code == 200, answer.text
    [turn] = target.engine.turns
    ids = [*turn.submit.prefix_ids, *turn.submit.history_ids, *turn.submit.new_ids]
    assert ids.count(CONTROL_TOKENS["<|im_start|>"]) == 3
    assert bytes(t for t in ids if t < 256).count(text.encode()) >= 2


def test_very_many_messages_and_very_long_ones(target: Target) -> None:
    target.engine.context_length = 1 << 20
    try:
        many = [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(2048)]
        assert target.post("/chat/completions", {**CHAT, "messages": many}).status_code == 200
        long = [{"role": "user", "content": "x" * 100_000}] * 8
        assert target.post("/chat/completions", {**CHAT, "messages": long}).status_code == 200
    finally:
        target.engine.context_length = 30_000
    answer = target.post("/chat/completions", {**CHAT, "messages": long})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.01}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "gpt-4"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"foo": 1}, "foo"),
    ],
)
def test_errors_name_the_field(target: Target, body: dict[str, Any], param: str) -> None:
    answer = target.post("/chat/completions", {**CHAT, **body})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    found = answer.json()["error"]["param"]
    assert found is not None
    assert found == param or found.startswith((f"{param}.", f"{param}[")), answer.text


def test_fields_that_ask_for_nothing_are_taken(target: Target) -> None:
    nothing = {
        "audio": None,
        "modalities": ["text"],
        "reasoning_effort": "none",
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "x"},
        "tools": [],
        "tool_choice": "none",
        "user": "someone",
        "logit_bias": {},
        "stop": None,
        "temperature": None,
    }
    assert target.post("/chat/completions", {**CHAT, **nothing}).status_code == 200


@few
@given(key=st.text(st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), max_size=60))
def test_any_id_in_a_path(target: Target, key: str) -> None:
    for path in ("responses", "conversations", "models"):
        answer = target.http.get(
            f"/{path}/{key.replace('/', '').replace('?', '').replace('#', '')}"
        )
        assert answer.status_code in (200, 400, 404, 405)

"""The official client against the real server, over a restart: fp32, greedy.

The reference for each answer is transformers' own generation over the token ids in the database.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from openai import OpenAI
from pydantic import BaseModel

from app.cli import main
from sessions.migrate import upgrade
from tests.e2e.server_process import ServerProcess
from tests.engine.harness import Oracle

RUN = "from app.cli import main; main()"
SYSTEM = (
    "You are a patient teacher of history. You answer the question that was asked and nothing "
    "else. You write short sentences in plain English. You give the most important fact first, "
    "then one example, then stop. You never make up a date: when you are not sure of a year, you "
    "name the century. You do not use lists unless you are asked for one."
)
MODEL = "default"
TOKENS = 24


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    upgrade(data / "rejoinder.db", data / "backups", lambda line: None)
    return data


@pytest.fixture
def key(data_dir: Path) -> str:
    made = CliRunner().invoke(main, ["keys", "create", "test", "--data-dir", str(data_dir)])
    assert made.exit_code == 0, made.output
    return str(made.stdout.strip())


@pytest.fixture
def start(data_dir: Path, model_dir: Path) -> Iterator[Callable[[], ServerProcess]]:
    """Starts the real server on the data directory, as often as asked."""
    started: list[ServerProcess] = []

    def begin() -> ServerProcess:
        command = ["-c", RUN, "serve", "--port", "0", "--data-dir", str(data_dir)]
        command += ["--model", str(model_dir), "--dtype", "fp32"]
        process = ServerProcess(command, data_dir / f"log{len(started)}", wait_s=240)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.stop()


def client_of(server: ServerProcess, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=240, max_retries=0)


def stored_ids(data_dir: Path, response_id: str) -> tuple[list[int], list[int]]:
    """The token ids before a response's answer, and those of the answer."""
    with sqlite3.connect(data_dir / "rejoinder.db", timeout=10) as db:
        key = response_id.removeprefix("resp_")
        [(leaf, prefix)] = db.execute(
            "SELECT r.message_id, p.token_ids FROM api_response r JOIN chat c ON c.id = r.chat_id"
            " JOIN prefix p ON p.id = c.prefix_id WHERE r.id = ?",
            (key,),
        )
        path: list[bytes] = []
        while leaf is not None:
            [(ids, leaf)] = db.execute(
                "SELECT token_ids, parent_id FROM message WHERE id = ?", (leaf,)
            )
            path.insert(0, ids)
    db.close()
    lists = [np.frombuffer(ids, dtype="<i4").tolist() for ids in (prefix, *path)]
    return [token for ids in lists[:-1] for token in ids], lists[-1]


class City(BaseModel):
    name: str
    river: str
    old: bool


def test_official_client_over_a_restart(
    start: Callable[[], ServerProcess], key: str, data_dir: Path, model_dir: Path
) -> None:
    oracle = Oracle(model_dir)
    server = start()
    chat: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Who built the great wall of China?"},
    ]
    with client_of(server, key) as client:
        [model] = client.models.list().data
        greedy: dict[str, Any] = {"model": model.id, "temperature": 0}
        first = client.responses.create(
            **greedy,
            instructions=SYSTEM,
            input="Who built the great wall of China?",
            max_output_tokens=TOKENS,
        )
        asked, answered = stored_ids(data_dir, first.id)
        assert answered == oracle.greedy(asked, TOKENS)

        stateless = client.chat.completions.create(**greedy, messages=chat, max_tokens=TOKENS)
        assert stateless.choices[0].message.content == first.output_text
        assert stateless.usage is not None
        assert stateless.usage.prompt_tokens == len(asked)
        details = stateless.usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens is not None
        assert details.cached_tokens > 60, "the system prompt is the same user's, of the response"

        pieces = client.chat.completions.create(
            **greedy,
            messages=chat,
            max_tokens=TOKENS,
            stream=True,
            logprobs=True,
            top_logprobs=1,
            stream_options={"include_usage": True},
        )
        chunks = list(pieces)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == first.output_text
        scores = [
            score
            for chunk in chunks
            if chunk.choices and chunk.choices[0].logprobs
            for score in chunk.choices[0].logprobs.content or []
        ]
        assert [s.token for s in scores] == [s.top_logprobs[0].token for s in scores]
        assert b"".join(bytes(s.bytes or []) for s in scores).decode() == text
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == len(asked) - 1

        parsed = client.chat.completions.parse(
            model=model.id,
            messages=[{"role": "user", "content": "Name a city. Answer in JSON."}],
            response_format=City,
            temperature=0,
            max_tokens=200,
        )
        assert isinstance(parsed.choices[0].message.parsed, City)
        anything = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "An object with one number."}],
            response_format={"type": "json_object"},
            seed=7,
            max_tokens=80,
        )
        if anything.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)

        three = client.chat.completions.create(
            model=model.id, messages=chat, n=3, seed=3, max_tokens=6, temperature=1.5
        )
        found = [choice.message.content for choice in three.choices]
        assert len(set(found)) > 1

        _client_that_leaves(server, key, model.id)
        assert complaints(data_dir, 0) == []
    server.stop()

    server = start()
    with client_of(server, key) as client:
        second = client.responses.create(
            **greedy,
            instructions=SYSTEM,
            input="How long did it take?",
            previous_response_id=first.id,
            max_output_tokens=TOKENS,
        )
        asked, answered = stored_ids(data_dir, second.id)
        assert answered == oracle.greedy(asked, TOKENS)
        assert second.usage is not None
        unrun = 0 if first.status == "completed" else 1
        before, first_answer = stored_ids(data_dir, first.id)
        cached = second.usage.input_tokens_details.cached_tokens
        assert cached == len(before) + len(first_answer) - unrun
        timings = second.model_extra["timings"]
        assert timings["restored_tokens"] + timings["shared_tokens"] == cached
        assert timings["recomputed_tokens"] == 0

        chat += [
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "How long did it take?"},
        ]
        stateless = client.chat.completions.create(**greedy, messages=chat, max_tokens=TOKENS)
        assert stateless.usage is not None
        details = stateless.usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens is not None
        assert details.cached_tokens >= len(before), "found again, and read back from disk"
        assert stateless.choices[0].message.content == second.output_text


def _client_that_leaves(server: ServerProcess, key: str, model: str) -> None:
    """Within about a second nothing runs any more."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count to ten thousand."}],
        "logit_bias": {"2": -100},
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=server.url, headers=headers, timeout=60) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        for _ in range(12):
            next(lines)
    left = time.monotonic()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        while http.get("/readyz").json()["running"]:
            assert time.monotonic() - left < 3, "the request was not freed"
            time.sleep(0.05)


def complaints(data_dir: Path, number: int) -> list[str]:
    """What the server's log says of failures."""
    lines = (data_dir / f"log{number}").read_text().splitlines()
    return [line for line in lines if " ERROR " in line or "Traceback" in line]

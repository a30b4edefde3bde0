"""Chat, be killed in mid-answer, start again, come back: the real server over HTTP, fp32, greedy.

The reference for each answer is transformers' own generation over the token ids in the database.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sessions.migrate import upgrade
from tests.app.web_client import Browser
from tests.e2e.server_process import ServerProcess
from tests.engine.harness import Oracle

ASSISTANT = "a" * 32
SYSTEM = (
    "You are a patient teacher of history. You answer the question that was asked and nothing "
    "else. You write short sentences in plain English. You give the most important fact first, "
    "then one example, then stop. You never make up a date: when you are not sure of a year, you "
    "name the century. You do not use lists unless you are asked for one."
)
RUN = "from app.cli import main; main()"
WAIT_S = 240
MAX_TOKENS = 120  # long enough to be killed in its middle


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory whose database has an assistant that answers greedily."""
    data = tmp_path / "data"
    data.mkdir()
    path = data / "rejoinder.db"
    upgrade(path, data / "backups", lambda line: None)
    now = datetime.now(UTC).isoformat()
    with sqlite3.connect(path) as db:
        db.execute(
            "INSERT INTO assistant (id, name, description, greeting, sampling, published,"
            " position, created_at) VALUES (?, 'Teacher', '', '', ?, 1, 0, ?)",
            (ASSISTANT, json.dumps({"temperature": 0.0, "max_tokens": MAX_TOKENS}), now),
        )
        db.execute(
            "INSERT INTO assistant_version (id, assistant_id, number, system_prompt, created_at)"
            " VALUES (?, ?, 1, ?, ?)",
            ("b" * 32, ASSISTANT, SYSTEM, now),
        )
    db.close()
    return data


@pytest.fixture
def start(data_dir: Path, model_dir: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts the real server on the data directory, as often as asked."""
    started: list[ServerProcess] = []

    def begin(*options: str) -> ServerProcess:
        command = ["-c", RUN, "serve", "--port", "0", "--data-dir", str(data_dir)]
        command += ["--model", str(model_dir), "--dtype", "fp32", *options]
        command += ["--speculation", "never"]  # an answer must not end before it is cut
        process = ServerProcess(command, data_dir / f"log{len(started)}", wait_s=WAIT_S)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.stop()


class Records:
    """What the database says, read beside the running server."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / "rejoinder.db"

    def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        with sqlite3.connect(self._path, timeout=10) as db:
            db.row_factory = sqlite3.Row
            found = [dict(row) for row in db.execute(query, values)]
        db.close()
        return found

    def messages(self, chat_id: str) -> list[dict[str, Any]]:
        return self.rows("SELECT * FROM message WHERE chat_id = ? ORDER BY created_at", chat_id)

    def ids(self, message: dict[str, Any]) -> list[int]:
        return [int(token) for token in np.frombuffer(message["token_ids"], dtype="<i4")]

    def prefix(self) -> list[int]:
        [row] = self.rows("SELECT token_ids FROM prefix")
        return self.ids(row)

    def latency(self, message_id: str) -> dict[str, Any]:
        [row] = self.rows(
            "SELECT l.* FROM turn_latency l JOIN turn t ON t.id = l.turn_id WHERE t.message_id = ?",
            message_id,
        )
        return row

    def wait(self, chat_id: str, count: int) -> list[dict[str, Any]]:
        """The chat's messages, once there are `count` and none is running."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = self.messages(chat_id)
            if len(found) == count and all(m["status"] != "running" for m in found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"chat {chat_id} did not come to rest: {self.messages(chat_id)}")


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["auto", "hidden"])
async def test_killed_in_mid_answer_and_back(
    start: Callable[..., ServerProcess], data_dir: Path, reference: Oracle, method: str
) -> None:
    records = Records(data_dir)
    server = start("--checkpoint-method", method)
    browser = Browser(server.url)
    await browser.get("/")
    answered = await browser.post(
        "/chats", {"assistant_id": ASSISTANT, "text": "Who built the great wall of China?"}
    )
    assert answered.status_code == 303
    chat_id = answered.headers["location"].removeprefix("/chats/").split("#")[0]
    records.wait(chat_id, 2)
    assert (await browser.say(chat_id, "How long did it take?")).status_code == 303
    before = records.wait(chat_id, 4)

    assert (await browser.say(chat_id, "What was it for?")).status_code == 303
    await browser.get(f"/chats/{chat_id}")
    async with browser.events(browser.turn_id) as events:
        for _ in range(2):  # the answer so far, and then some
            await events.next()
    os.kill(server.pid, signal.SIGKILL)
    server.stop()

    server = start("--checkpoint-method", method)
    back = Browser(server.url)
    back.http.cookies = browser.http.cookies
    page = (await back.get(f"/chats/{chat_id}")).text
    after = records.messages(chat_id)
    assert [m["text"] for m in after[:5]] == [
        *(m["text"] for m in before),
        "What was it for?",
    ]
    cut = after[5]
    assert cut["status"] == "interrupted"
    assert f"/messages/{cut['id']}/retry" in page

    assert (await back.post(f"/messages/{cut['id']}/retry")).status_code == 303
    retried = records.wait(chat_id, 7)[6]
    path = [records.prefix(), *(records.ids(m) for m in after[:5])]
    asked = [token for ids in path for token in ids]
    assert records.ids(retried) == reference.greedy(asked, MAX_TOKENS)
    record = records.latency(retried["id"])
    history = sum(len(ids) for ids in path[1:-1])
    unrun = 0 if before[-1]["finish_reason"] == "eos" else 1
    assert record["restored_tokens"] == history - unrun
    assert record["recomputed_tokens"] == 0
    assert record["prefix_restored_tokens"] == len(path[0])
    assert record["prefix_computed_tokens"] == 0
    # what the killed answer had said is the beginning of what is said now
    assert records.ids(retried)[: len(records.ids(cut))] == records.ids(cut)

    assert (await back.say(chat_id, "Can one visit it today?")).status_code == 303
    last = records.wait(chat_id, 9)
    asked += records.ids(retried) + records.ids(last[7])
    assert records.ids(last[8]) == reference.greedy(asked, MAX_TOKENS)
    assert records.latency(last[8]["id"])["resident_tokens"] > 0
    await browser.http.aclose()
    await back.http.aclose()

"""The real server at debug level: what it logs, what it tells of a stuck engine, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from app.cli import main
from sessions.migrate import upgrade
from tests.e2e.server_process import ROOT, ServerProcess

RUN = "from app.cli import main; main()"
CANARY = "zanzibarium"
WATCHDOG_S = 3
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("operations") / "data"
    upgrade(data / "rejoinder.db", data / "backups", lambda line: None)
    return data


@pytest.fixture(scope="module")
def key(data_dir: Path) -> str:
    made = CliRunner().invoke(main, ["keys", "create", "test", "--data-dir", str(data_dir)])
    assert made.exit_code == 0, made.output
    return str(made.stdout.strip())


@pytest.fixture(scope="module")
def running(data_dir: Path, model_dir: Path, key: str) -> Iterator[ServerProcess]:
    command = ["-c", RUN, "serve", "--port", "0", "--data-dir", str(data_dir)]
    command += ["--model", str(model_dir), "--log-level", "debug", "--log-format", "json"]
    command += ["--watchdog-s", str(WATCHDOG_S), "--drain-s", "60"]
    process = ServerProcess(command, data_dir / "log", wait_s=240)
    yield process
    process.stop()


@pytest.fixture
def http(running: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=LIMIT_S) as client:
        client.get("/")
        yield client


def log_lines(data_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_dir / "log").read_text().splitlines()]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def token_of(page: str) -> str:
    found = re.search(r'name="_csrf_token" value="([^"]+)"', page)
    assert found is not None
    return found[1]


def begin(http: httpx.Client, text: str) -> str:
    page = http.get("/").text
    assistant = re.search(r'name="assistant_id" value="([^"]+)"', page)
    assert assistant is not None
    fields = {"_csrf_token": token_of(page), "text": text, "assistant_id": assistant[1]}
    response = http.post("/chats", data=fields)
    assert response.status_code == 303, response.text
    return str(response.headers["location"])


def answers(data_dir: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(data_dir / "rejoinder.db", timeout=10)) as db:
        return db.execute(
            "SELECT status, text FROM message WHERE role = 'assistant' ORDER BY created_at, id"
        ).fetchall()


def engine_of(server: ServerProcess) -> psutil.Process:
    [engine] = [
        child
        for child in psutil.Process(server.pid).children()
        if "app.engine_process" in child.cmdline()
    ]
    return engine


def test_whole_turns_leave_no_word_of_theirs_in_the_log(
    running: ServerProcess, http: httpx.Client, data_dir: Path, key: str
) -> None:
    chat = begin(http, f"Say only the word {CANARY} and nothing else.")
    until(lambda: [status for status, _ in answers(data_dir)] == ["complete"])
    page = http.get(chat).text
    http.get(f"/search?q={CANARY}")
    http.get(f"{chat}/export/markdown")
    renamed = {"_csrf_token": token_of(page), "title": f"About {CANARY}"}
    assert http.post(f"{chat}/rename", data=renamed).status_code == 303
    refused = http.post("/chats", data={"text": CANARY}, headers={"X-Request-Id": "given-1"})
    assert refused.status_code == 403
    assert refused.headers["x-request-id"] == "given-1"
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": f"Repeat: {CANARY}"}],
        "max_tokens": 8,
    }
    headers = {"Authorization": f"Bearer {key}"}
    answered = http.post("/v1/chat/completions", json=body, headers=headers)
    assert answered.status_code == 200, answered.text
    bad = http.post("/v1/chat/completions", json=body | {"model": CANARY}, headers=headers)
    assert bad.status_code == 404
    lines = log_lines(data_dir)
    text = (data_dir / "log").read_text()
    said = [word for _, answer in answers(data_dir) for word in re.findall(r"\w{9,}", answer)]
    assert CANARY in page
    for word in {CANARY, key, *said}:
        assert word not in text, [line for line in lines if word in json.dumps(line)][:3]
    routes = [line for line in lines if "route" in line]
    by_id = {line["request_id"]: line for line in routes}
    assert len(by_id) == len(routes) > 5
    assert by_id[answered.headers["x-request-id"]]["route"] == "/v1/chat/completions"
    assert by_id["given-1"]["status"] == 403
    assert {line["level"] for line in lines} >= {"debug", "info"}
    assert not [line for line in lines if line["level"] == "error"]


def test_the_figures_know_the_turns(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    assert 'gen_ai_operation_name="chat"' in text
    assert re.search(r'rejoinder_request_success_total\{finished_reason="\w+"\} [12]\.0', text)
    assert re.search(r"^rejoinder_engine_steps_total [1-9]", text, re.M)
    assert CANARY not in text
    latency = http.get("/latency.json?span=hour").json()
    assert latency["summary"]["turns"] == 1  # the API's stateless call is no turn of a chat
    assert latency["summary"]["first_tokens"] == 1


def test_a_second_process_on_the_data_directory_refuses(
    running: ServerProcess, data_dir: Path, model_dir: Path
) -> None:
    command = [sys.executable, "-c", RUN, "serve", "--port", "0", "--data-dir", str(data_dir)]
    done = subprocess.run(
        [*command, "--model", str(model_dir)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert str(data_dir) in done.stderr


def test_a_stopped_engine_is_told_and_replaced(
    running: ServerProcess, http: httpx.Client, data_dir: Path
) -> None:
    before = engine_of(running)
    number = len(answers(data_dir))
    chat = begin(http, "Write a very long story about a lighthouse, a thousand words.")
    until(lambda: len(answers(data_dir)) > number and answers(data_dir)[-1][1])
    os.kill(before.pid, signal.SIGSTOP)
    assert http.get("/healthz").status_code == 200
    assert http.get("/readyz").json()["reason"] in (
        "the engine does not answer",
        "the engine is being started again",
    )
    until(lambda: answers(data_dir)[-1][0] == "interrupted")
    page = http.get(chat).text
    assert "made no progress" in page
    assert "/retry" in page
    until(lambda: http.get("/readyz").status_code == 200)
    assert engine_of(running).pid != before.pid
    errors = [line for line in log_lines(data_dir) if line["level"] == "error"]
    assert any("made no progress for 3 s" in line["message"] for line in errors)
    assert "rejoinder_engine_restarts_total 1.0" in http.get("/metrics").text
    begin(http, "Say hello.")
    until(lambda: answers(data_dir)[-1][0] == "complete")


def test_the_end_lets_an_answer_finish(
    running: ServerProcess, http: httpx.Client, data_dir: Path
) -> None:
    number = len(answers(data_dir))
    begin(http, "Count from one to ten.")
    until(lambda: len(answers(data_dir)) > number)
    process = psutil.Process(running.pid)
    engine = engine_of(running)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT_S)
    assert not engine.is_running()
    assert answers(data_dir)[-1][0] == "complete"
    assert not list((data_dir / "checkpoints").rglob("*.partial"))

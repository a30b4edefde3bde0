"""The load, the figures taken of it, and how each side's server is spoken to."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serve
from benchmarks.load import Exchange, Shape, draw
from benchmarks.report import Refused
from benchmarks.serve_sides import Answer, LlamaServer, Ours

STAND_IN = Path(__file__).with_name("stand_in_server.py")
LOAD = [[Exchange(question=f"Question {n}?", tokens=n + 3, gap_s=0.0) for n in range(3)]]


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[LlamaServer]:
    program = tmp_path / "llama-server"
    notes = tmp_path / "notes"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "{notes}" "$@"\n')
    program.chmod(0o755)
    side = LlamaServer(program, tmp_path / "model.gguf", 2, 1024, "Be brief.")
    yield side
    side.stop()


def requests(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / "notes").read_text().splitlines()]


def test_the_load_is_that_of_its_seed() -> None:
    shape = Shape(chats=3, turns=2)
    assert draw(shape, 1) == draw(shape, 1)
    assert draw(shape, 1) != draw(shape, 2)


def test_lengths_are_those_of_chat_logs_within_their_limits() -> None:
    turns = [turn for chat in draw(Shape(chats=500, turns=8), 7) for turn in chat]
    answers = [turn.tokens for turn in turns]
    words = [len(turn.question.split()) for turn in turns]
    assert statistics.mean(answers) == pytest.approx(360, rel=0.1)
    assert statistics.mean(words) == pytest.approx(70, rel=0.1)
    assert min(answers) >= 4
    assert max(answers) <= 1536
    assert statistics.quantiles(answers, n=100)[94] > 2.5 * statistics.median(answers)  # long tail
    later = [turn.gap_s for chat in draw(Shape(chats=500, turns=8), 7) for turn in chat[1:]]
    assert statistics.mean(later) == pytest.approx(8, rel=0.1)


def test_figures_are_of_first_and_of_returning_turns_apart() -> None:
    first = serve.Turn(returning=False, answer=Answer(1.0, [1.5, 1.6, 1.8], tokens=3))
    again = serve.Turn(returning=True, answer=Answer(9.0, [9.1, 9.2], tokens=2))
    row = serve.figures([first, again], took_s=10.0)
    assert row["ttft_first_p50_ms"] == 500.0
    assert row["ttft_returning_p99_ms"] == 100.0
    assert row["itl_p50_ms"] == 100.0
    assert row["itl_p99_ms"] == 200.0
    assert row["tok_s"] == 0.5


def test_llama_slots_are_restored_and_saved_around_each_turn(
    llama: LlamaServer, tmp_path: Path
) -> None:
    llama.start(tmp_path, 1)
    turns, _ = asyncio.run(serve._put_on(llama, LOAD))
    assert [turn.answer.tokens for turn in turns] == [3, 4, 5]
    assert [turn.returning for turn in turns] == [False, True, True]
    seen = requests(tmp_path)
    assert [path.rpartition("=")[2] for path, _ in seen] == [
        *("/v1/chat/completions", "save", "erase"),
        *("restore", "/v1/chat/completions", "save", "erase") * 2,
    ]
    last = [body for path, body in seen if path == "/v1/chat/completions"][-1]
    assert [message["role"] for message in last["messages"]] == [
        "system",
        *("user", "assistant") * 2,
        "user",
    ]
    assert last["messages"][2]["content"] == "w0 w1 w2 "
    assert last["ignore_eos"]
    assert last["id_slot"] == 0


def test_an_answer_of_another_length_is_refused(
    llama: LlamaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT", "1")
    llama.start(tmp_path, 1)
    with pytest.raises(Refused, match="made 2 tokens, not 3"):
        asyncio.run(serve._put_on(llama, LOAD))


def test_our_chats_send_the_question_and_the_answer_before_it(
    llama: LlamaServer, tmp_path: Path
) -> None:
    llama.start(tmp_path, 1)
    ours = Ours(tmp_path, "fp32", "Be brief.")
    ours.url, ours.key_of_api = llama.url, "rj-test"
    turns, _ = asyncio.run(serve._put_on(ours, LOAD))
    assert [turn.answer.tokens for turn in turns] == [3, 4, 5]
    bodies = [body for _, body in requests(tmp_path)]
    assert [body["previous_response_id"] for body in bodies] == [None, "resp_1", "resp_2"]
    assert [len(body["input"]) for body in bodies] == [2, 1, 1]


def test_a_program_that_does_not_serve_is_told(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho no such model\nexit 1\n")
    program.chmod(0o755)
    side = LlamaServer(program, tmp_path / "model.gguf", 2, 1024, "Be brief.")
    with pytest.raises(Refused, match="llama-server did not begin to serve: no such model"):
        side.start(tmp_path, 1)

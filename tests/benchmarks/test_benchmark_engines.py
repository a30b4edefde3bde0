"""`benchmarks.decode` beside other engines: the contract, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode
from benchmarks.comparison import Comparison
from benchmarks.decode_sizes import Sizes
from benchmarks.engines import gguf_weight_bytes
from benchmarks.floors import Precision
from benchmarks.llama_side import LlamaSide
from benchmarks.machine import Peak
from benchmarks.openvino_side import OpenVinoSide
from benchmarks.openvino_worker import Worker
from benchmarks.report import Refused
from engine.model.model_config import read_model_config
from tests.benchmarks.fake_engines import (
    InProcess,
    choice_of,
    inject_openvino,
    llama_calls,
    write_gguf,
    write_llama_bench,
)

Quick = Callable[..., tuple[int, dict[str, Any] | None, str]]

TINY = Sizes(
    batches=(1,),
    prefixes=(70,),
    peer_batches=(1,),
    peer_prefix=70,
    flat_batches=(1,),
    flat=(70, 70),
    suffix=5,
    steps=2,
    peer_steps=2,
    row_s=5.0,
    mha_batches=(),
    mha_prefixes=(),
    engine_batches=(1, 3),
    engine_prefixes=(0, 70),
    engine_steps=4,
    engine_rounds=2,
)
ROW = {
    "model": str,
    "batch": int,
    "prefix": int,
    "suffix": int,
    "ratio": float,
    "ours_tok_s": float,
    "theirs_tok_s": float,
    "ours_floor_share": float,
    "theirs_floor_share": float,
    "counts": bool,
}
CHATTY_MODULE = """
from types import SimpleNamespace as GenerationConfig, SimpleNamespace as SchedulerConfig
from types import SimpleNamespace
__version__ = "4.5"
class ContinuousBatchingPipeline:
    def __init__(self, *_):
        self.left = 0
    def add_request(self, number, ids, config):
        if config.max_new_tokens > 4:
            raise RuntimeError(f"no room for {config.max_new_tokens} tokens")
        self.left = config.max_new_tokens
        output = SimpleNamespace(generated_ids=[7])
        return SimpleNamespace(can_read=lambda: True, read=lambda: {0: output})
    def has_non_finished_requests(self):
        return self.left > 0
    def step(self):
        print("a step")
        self.left -= 1
"""
SUFFIXES = [[5, 6, 7], [8, 9, 10]]


@pytest.fixture
def gguf(tmp_path: Path, tiny_model: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_model)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No child process."""
    monkeypatch.setattr("benchmarks.openvino_side.Popen", InProcess)
    return monkeypatch


def openvino_side(gguf: Path) -> OpenVinoSide:
    return OpenVinoSide(gguf, torch.get_num_threads(), 1)


def test_both_engines_keep_the_contract(
    quick: Quick, in_process: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, gguf: Path
) -> None:
    binary = write_llama_bench(tmp_path / "llama-batched-bench")
    inject_openvino(in_process, choice_of(tiny_model))
    in_process.setattr(decode, "QUICK", TINY)
    options = ["--openvino", "--llama-bench", str(binary), "--gguf", str(gguf)]
    status, result, error = quick(decode.main, *options)
    assert status == 0, error
    assert result is not None
    assert result["machine"]["versions"]["openvino-genai"] == "1.2.3"
    assert result["machine"]["versions"]["llama.cpp"] == "11434 (0a1f017)"
    for key, note in (("vs_openvino", "agreement"), ("vs_llamacpp", "kv_cache")):
        sizes = [(row["batch"], row["prefix"]) for row in result[key]]
        assert sizes == [(1, 0), (3, 0), (1, 70), (3, 70)]
        for row in result[key]:
            types = {name: type(value) for name, value in row.items() if name != note}
            assert types == ROW
            assert row["ratio"] == pytest.approx(row["ours_tok_s"] / row["theirs_tok_s"], rel=0.05)
            assert row["suffix"] == 8  # 5 given, the first token, and a half of 4 steps: 7.5
    assert {row["agreement"] for row in result["vs_openvino"]} == {1.0}
    for row in result["vs_llamacpp"]:
        assert row["kv_cache"] == ("unified" if row["batch"] > 1 else "default")
        seconds = 0.005 if row["batch"] > 1 else 0.010  # of a step, by the kind of cache
        assert row["theirs_tok_s"] == pytest.approx(row["batch"] / seconds)
    # Of two rounds of a batch the first tries both kinds; a sequence alone has one.
    asked = [dict(zip(call[::2], call[1::2], strict=False)) for call in llama_calls(binary)]
    assert [(call["-npp"], call["-npl"]) for call in asked] == [
        *[("1", "1")] * 2,
        *[("1", "3")] * 3,
        *[("70", "1")] * 2,
        *[("70", "3")] * 3,
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--openvino"], "--gguf PATH"),
        (["--llama-bench", "no-such-binary"], "--gguf PATH"),
        (["--openvino", "--gguf", "GGUF"], "pip install openvino-genai"),
        (["--llama-bench", "no-such-binary", "--gguf", "GGUF"], "no-such-binary cannot be run"),
        (["--openvino", "--gguf", "no-such-file"], "not a usable GGUF file"),
    ],
)
def test_what_is_missing_is_named(
    options: list[str], reason: str, quick: Quick, monkeypatch: pytest.MonkeyPatch, gguf: Path
) -> None:
    monkeypatch.setattr("benchmarks.openvino_side.find_spec", lambda _: None)
    arguments = [str(gguf) if option == "GGUF" else option for option in options]
    status, result, error = quick(decode.main, *arguments)
    assert (status, result) == (1, None)
    assert reason in error


def test_a_file_of_another_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", tiny_model, block_count=77)
    with pytest.raises(Refused, match="its block_count is 77"):
        gguf_weight_bytes(other, read_model_config(tiny_model))


def test_other_choices_than_ours_are_refused(in_process: pytest.MonkeyPatch, gguf: Path) -> None:
    inject_openvino(in_process, lambda ids: ids[-1] + 1)
    side = openvino_side(gguf)
    side.begin([1, 2], SUFFIXES, [8, 0])
    assert side.notes(2) == {"agreement": 0.5}
    with pytest.raises(Refused, match="agree with ours in 0% of the rows"):
        side.begin([1, 2], SUFFIXES, [0, 0])


def test_only_steps_of_all_rows_are_timed(in_process: pytest.MonkeyPatch, gguf: Path) -> None:
    inject_openvino(in_process, lambda ids: ids[-1] + 1)
    worker = Worker(str(gguf), torch.get_num_threads(), 1)
    tokens, steps_s = worker.generate([[1], [11], [21]], 4)
    assert tokens == [[2, 3, 4, 5], [12, 13, 14, 15], [22, 23, 24, 25]]
    # The third row begins in the second step; the first two have ended before its last.
    assert len(steps_s) == 2
    side = openvino_side(gguf)
    side.begin([], [[i] for i in range(9)], list(range(1, 10)))
    with pytest.raises(Refused, match="all 9 rows together in 0 of 4 steps"):
        side.step_seconds(9, 4)


def test_a_child_process_answers_and_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: Path
) -> None:
    (tmp_path / "openvino.py").write_text("Tensor = list\n")
    (tmp_path / "openvino_genai.py").write_text(CHATTY_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    side = openvino_side(gguf)
    assert side.version == "4.5"
    side.begin([], [[1]], [7])
    assert len(side.step_seconds(1, 3)) == 3
    with pytest.raises(Refused, match="no room for 9 tokens"):
        side.step_seconds(1, 8)
    side.close()


def test_older_llama_benches_run_with_their_one_cache(tmp_path: Path, gguf: Path) -> None:
    binary = write_llama_bench(tmp_path / "old", old=True)
    side = LlamaSide(binary, gguf, 2)
    side.begin([], [[1] * 5], [0])
    assert side.step_seconds(3, 4) == [pytest.approx(0.010)]
    assert side.notes(3) == {"kv_cache": "default"}
    assert side.step_seconds(3, 4) == [pytest.approx(0.010)]
    calls = llama_calls(binary)
    assert ["--kv-unified" in call for call in calls] == [True, False, False]
    said = dict(zip(calls[-1][::2], calls[-1][1::2], strict=False))
    assert said["-m"] == str(gguf)
    # No prompt is one token; rows grow from 0 to 10 keys, ours from 6 on.
    assert (said["-npp"], said["-ntg"], said["-npl"], said["-t"]) == ("1", "10", "3", "2")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("#!/bin/sh\necho 'error: cannot load model' >&2; exit 3\n", "cannot load model"),
        ("#!/bin/sh\necho done\n", "printed 0 results"),
        ("#!/bin/sh\necho '{\"pp\": 1}'\n", "KeyError"),
        ("#!/bin/sh\necho '{broken'\n", "printed '{broken'"),
    ],
)
def test_a_llama_bench_that_fails_is_refused(
    content: str, reason: str, tmp_path: Path, gguf: Path
) -> None:
    binary = tmp_path / "bench"
    binary.write_text(content)
    binary.chmod(0o755)
    side = LlamaSide(binary, gguf, 2)
    side.begin([], [[1] * 5], [0])
    with pytest.raises(Refused, match=reason):
        side.step_seconds(3, 4)


def test_a_prompt_that_was_not_shared_is_refused(tmp_path: Path, gguf: Path) -> None:
    side = LlamaSide(write_llama_bench(tmp_path / "bench", shared=0), gguf, 2)
    side.begin([], [[1] * 5], [0])
    with pytest.raises(Refused, match="'is_pp_shared': 0"):
        side.step_seconds(3, 4)


def test_each_side_has_the_floor_of_its_own_precision(tiny_model: Path) -> None:
    config = read_model_config(tiny_model)
    peak = Peak(1e9, 1e30, 1e30)  # bytes alone count
    one = Comparison(4, 1000, 10, ours_s=1e-3, theirs_s=1e-3)
    same = one.row("m", config, peak, Precision(2, 2), Precision(2, 2))
    smaller = one.row("m", config, peak, Precision(2, 2), Precision(2, 1))
    keys = 4 * 1010 * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    assert smaller["ours_floor_share"] == same["ours_floor_share"]
    saved = same["theirs_floor_share"] - smaller["theirs_floor_share"]
    assert saved == pytest.approx(keys / 1e9 / 1e-3, abs=2e-3)

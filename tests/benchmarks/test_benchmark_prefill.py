"""benchmarks.prefill: prompts are read whole, by all sides in turn, and held against floors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefill
from benchmarks.report import Refused, parse
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
TINY = prefill.Sizes((70, 300), 2)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "QUICK", TINY)
    monkeypatch.setattr("benchmarks.openvino_side.Popen", InProcess)  # no child process


def test_rows_alone(quick: Quick) -> None:
    status, result, error = quick(prefill.main, "--weights", "fp32")
    assert status == 0, error
    assert result is not None
    assert (result["weights"], result["chunk"]) == ("fp32", 512)
    assert [row["tokens"] for row in result["prefill"]] == [70, 300]
    for row in result["prefill"]:
        assert row["tok_s"] == pytest.approx(row["tokens"] / row["ms"] * 1e3, rel=0.1)
        assert row["floor_ms"] >= 0
        assert row["floor_share"] == row["gemm_share"]  # weights as wide as the dtype
    assert not any(key.startswith("vs_") for key in result)


def test_every_side_reads_every_prompt_in_turn(
    quick: Quick, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_model)
    binary = write_llama_bench(tmp_path / "llama-batched-bench")
    choose = choice_of(tiny_model)
    theirs: list[list[int]] = []
    ours: list[list[int]] = []

    def chosen(ids: list[int]) -> int:
        theirs.append(list(ids))
        return choose(ids)

    inject_openvino(monkeypatch, chosen)
    read = prefill.Reading.prefill_seconds

    def noted(self: prefill.Reading, ids: list[int]) -> tuple[float, int]:
        ours.append(list(ids))
        return read(self, ids)

    monkeypatch.setattr(prefill.Reading, "prefill_seconds", noted)
    options = ["--openvino", "--llama-bench", str(binary), "--gguf", str(gguf)]
    status, result, error = quick(prefill.main, *options)
    assert status == 0, error
    assert result is not None
    assert ours == theirs
    assert [len(ids) for ids in ours] == [70] * 3 + [300] * 3
    starts = [tuple(ids[:64]) for ids in ours]
    assert len(set(starts)) == len(starts)  # no cache of prompts helps
    asked = [dict(zip(call[::2], call[1::2], strict=False)) for call in llama_calls(binary)]
    assert [(call["-npp"], call["-ntg"], call["-npl"]) for call in asked] == [
        (str(len(ids)), "1", "1") for ids in ours
    ]
    for key in ("vs_openvino", "vs_llamacpp"):
        assert [row["tokens"] for row in result[key]] == [70, 300]
        for row in result[key]:
            assert row["ratio"] == pytest.approx(row["ours_tok_s"] / row["theirs_tok_s"], rel=0.05)
    assert {row["agreement"] for row in result["vs_openvino"]} == {1.0}
    for row in result["vs_llamacpp"]:  # 0.101 s, whatever the prompt
        assert row["theirs_tok_s"] == pytest.approx(row["tokens"] / 0.101, rel=0.01)
        assert "agreement" not in row


def test_another_choice_than_ours_is_refused(
    quick: Quick, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_model)
    inject_openvino(monkeypatch, lambda ids: 0)
    status, result, error = quick(prefill.main, "--openvino", "--gguf", str(gguf))
    assert (status, result) == (1, None)
    assert "agree with ours in 0% of the rows" in error


def test_a_prompt_that_cannot_be_read_is_refused(tiny_model: Path) -> None:

    options = parse(None, ["--model", str(tiny_model), "--dtype", "fp32"], prefill._add_options)
    reading = prefill.Reading(options, read_model_config(tiny_model), 70)
    with pytest.raises(Refused, match="a prompt was not read: the chat has 2000 tokens"):
        reading.prefill_seconds([5] * 2000)

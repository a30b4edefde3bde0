"""`benchmarks.decode`: its contract, and that wrong results are never reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.model.attention
import engine.model.decoder
from benchmarks import decode, plot
from benchmarks.decode_sizes import Sizes
from engine.model.sharing_gate import SharingGate

Quick = Callable[..., tuple[int, dict[str, Any] | None, str]]

TINY = Sizes(
    batches=(1, 3),
    prefixes=(0, 70),
    peer_batches=(2,),
    peer_prefix=70,
    flat_batches=(3,),
    flat=(70, 200),
    suffix=5,
    steps=3,
    peer_steps=2,
    row_s=5.0,
    mha_batches=(),
    mha_prefixes=(),
    engine_batches=(1,),
    engine_prefixes=(0,),
    engine_steps=2,
    engine_rounds=1,
)
COMPARISON = {
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
    "kl": float,
}
SHARING = {**COMPARISON, "gate": bool}
FLATNESS = {"batch": int, "short_prefix": int, "long_prefix": int, "ratio": float}


@pytest.fixture(autouse=True)
def _tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "QUICK", TINY)


def test_the_last_line_keeps_the_contract(quick: Quick) -> None:
    status, result, _ = quick(decode.main)
    assert status == 0
    assert result is not None
    assert result["benchmark"] == "decode"
    assert result["quick"] is True
    assert result["dtype"] == "fp32"
    assert {"cpu", "cores", "versions", "load_average"} <= result["machine"].keys()
    assert result["memory_gb_s"] > 0
    assert result["gemm_gflop_s"] > 0
    assert result["transformers_attention"]["2"] in ("sdpa", "eager")
    assert not {"vs_openvino", "vs_llamacpp"} & result.keys()  # only when asked for
    expected = {
        "shared_vs_unshared": [(1, 0), (3, 0), (1, 70), (3, 70)],
        "vs_transformers": [(2, 70)],
    }
    for key, sizes in expected.items():
        assert [(row["batch"], row["prefix"]) for row in result[key]] == sizes
        for row in result[key]:
            keys = SHARING if key == "shared_vs_unshared" else COMPARISON
            assert {name: type(value) for name, value in row.items()} == keys
            assert row["ratio"] == pytest.approx(row["ours_tok_s"] / row["theirs_tok_s"], rel=0.05)
            assert row["ours_floor_share"] > 0
    for row in result["flatness"]:
        assert {name: type(value) for name, value in row.items()} == FLATNESS
    assert [(r["batch"], r["short_prefix"], r["long_prefix"]) for r in result["flatness"]] == [
        (3, 70, 200)
    ]


def test_a_prefix_that_sharing_ignores_is_refused(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore(q: Tensor, k: Tensor, v: Tensor, groups: object, *rest: Any) -> None:
        _, out, lse = rest
        out.zero_()
        lse.fill_(float("-inf"))

    monkeypatch.setattr(engine.model.attention, "prefix_attention", ignore)
    monkeypatch.setattr(SharingGate, "shares", lambda self, num_tokens, num_rows: True)
    status, result, error = quick(decode.main)
    assert (status, result) == (1, None)
    assert "refuses to report" in error
    assert "shared and unshared" in error


def test_a_model_that_is_not_transformers_is_refused(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_activation(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.relu(gate) * up

    monkeypatch.setattr(engine.model.decoder, "silu_mul", other_activation)
    status, result, error = quick(decode.main)
    assert (status, result) == (1, None)
    assert "transformers" in error


def test_a_prefix_beyond_the_context_and_a_second_model(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    monkeypatch.setattr(decode, "make_mha_model", lambda parent, tokenizer_dir, layers: other)
    sizes = replace(
        TINY, batches=(2,), prefixes=(4200,), mha_batches=(1, 2), mha_prefixes=(64,), suffix=8
    )
    monkeypatch.setattr(decode, "QUICK", sizes)
    out = tmp_path / "results" / "decode.json"
    status, result, _ = quick(decode.main, "--out", str(out))
    assert status == 0
    assert result is not None
    rows = [(r["model"], r["batch"], r["prefix"]) for r in result["shared_vs_unshared"]]
    assert rows == [
        (tiny_model.name, 2, 4200),
        ("other", 1, 64),
        ("other", 2, 64),
    ]
    # pages of 64 tokens: 66 for the prefix, one a row
    (memory,) = result["memory"]
    page_mib = 64 * 3 * 2 * 2 * 64 * 4 / 2**20
    assert memory["held_mib"] == pytest.approx(68 * page_mib, abs=0.1)
    assert memory["ratio"] == pytest.approx(68 * 64 / (4200 + 2 * 9), abs=0.001)
    assert json.loads(out.read_text()) == result
    assert plot.main([str(out)]) == 0
    drawn = out.with_suffix(".svg").read_text()
    assert all(text in drawn for text in ("batch 2, unshared", "tokens per second"))


def test_what_is_no_result_is_not_plotted(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert plot.main([str(path)]) == 1


def test_the_restore_plot_has_a_curve_for_each_method(tmp_path: Path) -> None:
    rows = [
        {"model": "m", "tokens": n, "disk_mbps": d, "throttled": d == 125, "method": method,
         "ttft_ms": n / d}
        for n, own_speed in ((100, 1900.0), (1000, 2000.4))  # measured for each length
        for d in (125, own_speed)
        for method in ("auto", "kv")
    ]  # fmt: skip
    path = tmp_path / "resume.json"
    path.write_text(json.dumps({"benchmark": "resume", "rows": rows}))
    assert plot.main([str(path)]) == 0
    drawn = path.with_suffix(".svg").read_text()
    assert all(text in drawn for text in ("auto", "kv", "m, 125 MB/s"))
    assert drawn.count("own speed") == 1

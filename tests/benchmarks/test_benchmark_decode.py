"""`benchmarks.decode`: its contract, and that wrong results are never reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.model.attention
import engine.model.decoder
from benchmarks import decode
from benchmarks.decode_sizes import Sizes

Quick = Callable[[Callable[..., int]], tuple[int, dict[str, Any] | None, str]]

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
            assert {name: type(value) for name, value in row.items()} == COMPARISON
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


def test_a_context_that_is_too_short_is_refused(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "QUICK", replace(TINY, suffix=5000))
    status, result, error = quick(decode.main)
    assert (status, result) == (1, None)
    assert "the model's context holds 4096" in error

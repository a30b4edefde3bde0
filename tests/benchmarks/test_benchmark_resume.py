"""`benchmarks.resume`: its contract, and that wrong results are never reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from benchmarks import resume
from benchmarks.throttle import ThrottledStore
from engine.model.decoder import Decoder

Quick = Callable[[Callable[..., int]], tuple[int, dict[str, Any] | None, str]]

TINY = resume.Sizes(
    tokens=200,
    max_prefix=90,
    mbps=(5,),
    rounds=2,
    throttled_rounds=1,
    recompute_rounds=1,
    raw_bytes=8 << 20,
    mha=False,
)
ROW = {
    "model": str,
    "tokens": int,
    "prefix": int,
    "disk_mbps": int,
    "throttled": bool,
    "method": str,
    "plan": str,
    "restore_ms": float,
    "ttft_ms": float,
    "bytes": int,
    "predicted_ms": float,
    "lower_bound_ms": float,
    "floor_share": float,
    "io_ms": float,
    "compute_ms": float,
    "first_ttft_ms": float,
    "ttft_vs_recompute": float,
    "kl": float,
}
KV_BYTES = 200 * 3 * 2 * 2 * 64 * 4  # tokens, layers, K and V, heads, head_dim, fp32
HIDDEN_BYTES = 200 * 2 * 128 * 4  # the input of layer 0 is the embedding


@pytest.fixture(autouse=True)
def _tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "QUICK", TINY)


def test_the_last_line_keeps_the_contract(quick: Quick) -> None:
    status, result, error = quick(resume.main)
    assert status == 0, error
    assert result is not None
    assert result["raw_disk_mbps"] > 0
    rows = result["rows"]
    order = ["recompute", "kv", "hidden", "auto"]
    assert [(row["throttled"], row["method"]) for row in rows] == [
        (throttled, method) for throttled in (False, True) for method in order
    ]
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == ROW
        assert row["tokens"] == 200
        assert row["prefix"] == 90
        assert 0 < row["restore_ms"] <= row["ttft_ms"] + 50
        disk_mbps = 5 if row["throttled"] else result["raw_disk_mbps"]
        assert abs(row["disk_mbps"] - disk_mbps) <= 1  # both are rounded
    bytes_of = {row["method"]: row["bytes"] for row in rows}
    assert bytes_of["recompute"] == 0
    # the last stripe, of 8 tokens, was extended by the answer that was given next
    assert KV_BYTES <= bytes_of["kv"] <= KV_BYTES * 264 / 200
    assert HIDDEN_BYTES <= bytes_of["hidden"] <= HIDDEN_BYTES * 264 / 200
    slow = {row["method"]: row for row in rows if row["throttled"]}
    for method in ("kv", "hidden"):
        assert slow[method]["restore_ms"] >= bytes_of[method] / 5e6 * 1e3 * 0.9
        assert slow[method]["restore_ms"] >= slow[method]["lower_bound_ms"]


def test_restored_garbage_is_refused(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Decoder.restore

    def wrong_layer(
        self: Decoder, layer: int, hidden: Tensor, positions: Tensor, slots: Tensor
    ) -> None:
        project(self, layer, hidden.flip(0), positions, slots)

    monkeypatch.setattr(Decoder, "restore", wrong_layer)
    status, result, error = quick(resume.main)
    assert (status, result) == (1, None)
    assert "hidden" in error


def test_a_store_that_finds_nothing_is_refused(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ThrottledStore, "find", lambda self, owner, fingerprint, wanted: [None] * len(wanted)
    )
    status, result, error = quick(resume.main)
    assert (status, result) == (1, None)
    assert "0 tokens were restored" in error

"""`benchmarks.resume`: its contract, and that wrong results are never reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from benchmarks import resume
from benchmarks.floors import RestoreCosts
from benchmarks.restored import floor_s, plan_text, with_recomputed
from benchmarks.resume_sizes import Sizes
from benchmarks.throttle import ThrottledStore
from engine.model.decoder import Decoder
from engine.profile.record import DiskRead
from engine.restoration.plan import RestoredPart

Quick = Callable[[Callable[..., int]], tuple[int, dict[str, Any] | None, str]]

TINY = Sizes(
    tokens=(60, 200),
    mha_tokens=(),
    max_prefix=90,
    mbps=(5,),
    rounds=2,
    throttled_rounds=1,
    recompute_rounds=1,
    raw_bytes=8 << 20,
)
FAST = DiskRead(bytes_per_s=1e12, first_s=0.0, first_bytes=0)  # whatever the test's disk gives
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
    monkeypatch.setattr(resume, "measure_store", lambda directory: FAST)


def test_the_last_line_keeps_the_contract(quick: Quick) -> None:
    status, result, error = quick(resume.main)
    assert status == 0, error
    assert result is not None
    assert result["raw_disk_mbps"] > 0
    rows = result["rows"]
    assert [(row["throttled"], row["tokens"], row["method"]) for row in rows] == [
        (throttled, tokens, method)
        for throttled in (False, True)
        for tokens in (60, 200)
        for method in ("recompute", "kv", "hidden", "auto")
    ]
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == ROW
        assert row["prefix"] == 90
        assert 0 < row["restore_ms"] <= row["ttft_ms"] + 50
        assert row["predicted_ms"] > 0 or not row["throttled"]
        if row["throttled"]:
            assert row["disk_mbps"] == 5
        else:  # the median of some passes, and the best of all
            assert 0 < row["disk_mbps"] <= result["raw_disk_mbps"] + 1
        if row["method"] != "auto":
            assert row["plan"] == f"3 {row['method']}"
    fast = {row["method"]: row for row in rows if row["tokens"] == 200 and not row["throttled"]}
    slow = {row["method"]: row for row in rows if row["tokens"] == 200 and row["throttled"]}
    assert slow["recompute"]["bytes"] == 0
    # the last stripe, of 8 tokens, was extended by the answer that was given next
    assert KV_BYTES <= slow["kv"]["bytes"] <= KV_BYTES * 264 / 200
    assert HIDDEN_BYTES <= slow["hidden"]["bytes"] <= HIDDEN_BYTES * 264 / 200
    for method in ("kv", "hidden"):
        read_ms = slow[method]["bytes"] / 5e6 * 1e3
        assert slow[method]["restore_ms"] >= read_ms * 0.9
        assert slow[method]["restore_ms"] >= slow[method]["lower_bound_ms"]
        assert slow[method]["predicted_ms"] >= read_ms * 0.9
    # each planned for its own disk: reads that cost nothing, and reads that cost more than layers
    assert fast["auto"]["bytes"] > 0
    assert slow["auto"]["bytes"] < fast["auto"]["bytes"]
    warm_ups = result["warm_ups"]
    assert [row["tokens"] for row in warm_ups] == [60, 200]
    for row in warm_ups:
        assert row["warmed_ttft_ms"] > 0 < row["resident_ttft_ms"]
        assert row["ratio"] > 0


def part(start: int, tokens: int, recompute: int, hidden: int, kv: int) -> RestoredPart:
    return RestoredPart(start, tokens, recompute, hidden, kv, 0)


def test_layers_of_a_mixed_plan_are_counted_as_they_came_back() -> None:
    mixed = part(100, 128, 3, 1, 26)
    assert plan_text([mixed]) == "3 recompute + 1 hidden + 26 kv"
    whole = with_recomputed([mixed, part(292, 8, 0, 0, 30)], 100, 250, 30)
    assert whole == [
        mixed,
        part(228, 64, 30, 0, 0),
        part(292, 8, 0, 0, 30),
        part(300, 50, 30, 0, 0),
    ]
    assert plan_text(whole[:2]) == (
        "3 recompute + 1 hidden + 26 kv for 128 tokens, 30 recompute for 64 tokens"
    )


def test_the_floor_of_a_mixed_plan() -> None:
    costs = RestoreCosts(30, c_layer=5.0, c_hidden=1.0, io_hidden=4.0, io_kv=2.0)
    assert floor_s([(costs, part(0, 64, 3, 1, 26))]) == 52.0  # the reads: a free hidden layer
    assert floor_s([(costs, part(0, 64, 20, 4, 6))]) == 104.0  # the compute
    # the reads of one part hide behind the compute of another
    parts = [(costs, part(0, 64, 30, 0, 0)), (costs, part(64, 64, 0, 0, 30))]
    assert floor_s(parts) == 150.0


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

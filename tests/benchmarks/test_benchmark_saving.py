"""`benchmarks.saving` and `benchmarks.interference`: contracts, and what they refuse to report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import interference, profiling, saving
from benchmarks.stepping import SteppedEngine
from engine.profile.record import DiskRead
from engine.restoration.checkpoint import Recorder

Quick = Callable[..., tuple[int, dict[str, Any] | None, str]]


@pytest.fixture(autouse=True)
def _tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "QUICK", saving.Sizes(batches=(1, 3), rounds=2, steps=64))
    sizes = interference.Sizes(
        running=2, prompt=20, idle=2, tokens=300, rounds=2, gaps=5, restores=2
    )
    monkeypatch.setattr(interference, "QUICK", sizes)
    fast = DiskRead(bytes_per_s=1e12, first_s=0.0, first_bytes=0)  # whatever the test's disk gives
    monkeypatch.setattr(profiling, "measure_store", lambda directory: fast)


def test_saving_keeps_its_contract(quick: Quick) -> None:
    status, result, error = quick(saving.main)
    assert status == 0, error
    assert result is not None
    assert [(row["method"], row["batch"]) for row in result["rows"]] == [
        ("auto", 1),
        ("hidden", 1),
        ("auto", 3),
        ("hidden", 3),
    ]
    assert result["itl_ratio"] == max(row["ratio"] for row in result["rows"])
    for row in result["rows"]:
        assert min(row["on_ms"], row["off_ms"], row["ratio"], row["p95_ratio"]) > 0


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    off = [[0.010] * 20, [0.020] * 20, [0.010] * 20]
    on = [[0.011] * 20, [0.020] * 20, [0.030] * 18 + [0.060, 0.060]]
    row = saving._row("auto", "kv", 3, off, on)
    assert row["off_ms"] == pytest.approx(1e3 * 0.04 / 3, abs=1e-3)
    assert row["on_ms"] == pytest.approx(1e3 * 0.064 / 3, abs=1e-3)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["p95_ratio"] == pytest.approx(1.1)


def test_a_dropped_stripe_is_refused(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Recorder._submit
    calls = iter(range(1000))

    def forget_one(self: Recorder, *arguments: Any) -> None:
        if next(calls) != 4:
            submit(self, *arguments)

    monkeypatch.setattr(Recorder, "_submit", forget_one)
    status, result, error = quick(saving.main)
    assert (status, result) == (1, None)
    assert "bytes are on disk" in error


def test_interference_keeps_its_contract(quick: Quick) -> None:
    status, result, error = quick(interference.main)
    assert status == 0, error
    assert result is not None
    assert [row["method"] for row in result["rows"]] == ["auto", "hidden"]
    methods = result["rows"][0]["plan"].replace("+", " ").split()  # by this machine's own figures
    assert {word for word in methods if not word.isdigit()} <= {"recompute", "hidden", "kv"}
    assert result["rows"][1]["plan"] == "hidden"
    assert result["p99_itl_ratio"] == max(row["p99_itl_ratio"] for row in result["rows"])
    assert result["restore_rate_ratio"] == min(row["restore_rate_ratio"] for row in result["rows"])
    assert result["restore_rate_ratio"] > 0


def test_a_restore_that_loses_tokens_is_refused(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = SteppedEngine.restored
    monkeypatch.setattr(SteppedEngine, "restored", lambda self, chat: restored(self, chat) - 1)
    status, result, error = quick(interference.main)
    assert (status, result) == (1, None)
    assert "299 of 300 tokens came back" in error

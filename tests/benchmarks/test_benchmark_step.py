"""benchmarks.step on a tiny model: all parts are there, add up, and lie beside their floors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import step
from benchmarks.floors import Precision
from benchmarks.machine import Peak
from benchmarks.step_parts import PARTS, Clocks
from engine.model.model_config import read_model_config

SMALL = step.Sizes((1, 3), (0, 130), ("greedy", "sampled"), 4, 60.0, (16, 64))


def test_rows(
    quick: Callable[..., tuple[int, dict[str, Any] | None, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "QUICK", SMALL)
    status, result, _ = quick(step.main)
    assert status == 0
    assert result is not None
    assert result["benchmark"] == "step"
    keys = [(row["batch"], row["prefix"], row["sampler"]) for row in result["rows"]]
    assert len(keys) == len(set(keys)) == 8
    for row in result["rows"]:
        assert row["step_ms"] > 0
        assert row["projections_ms"] > 0
        assert row["norms_rope_ms"] > 0
        assert row["head_ms"] > 0
        assert row["sampling_ms"] > 0
        assert row["scheduling_ms"] > 0
        assert row["answers_ms"] > 0
        assert 0 < row["overhead_share"] < 1
        assert all(row[f"{part}_ms"] >= 0 for part in (*PARTS, "python"))
    assert [row["tokens"] for row in result["prefill"]] == [16, 64]
    assert [(row["batch"], row["prefix"], row["sampler"]) for row in result["floors"]] == keys
    assert all(0 < row["projections_share"] < 2 for row in result["floors"])


def test_floors_are_bytes_or_flops_whichever_is_more(tiny_model: Any) -> None:
    config = read_model_config(tiny_model)
    slow_memory, slow_products = Peak(1e9, 1e18), Peak(1e18, 1e9)
    width, heads, kv = 128, 4 * 64, 2 * 64
    weights = 3 * (width * (heads + 2 * kv) + heads * width + 3 * width * 192)
    four = Precision.of(None, 4)
    by_bytes = step.floors(config, four, slow_memory, 8, 100, 10)
    assert by_bytes["projections"] == pytest.approx(weights * 4 / 1e6)
    assert by_bytes["prefix_attention"] == pytest.approx(100 * 3 * 2 * kv * 4 / 1e6)
    assert by_bytes["suffix_attention"] == pytest.approx(8 * 10 * 3 * 2 * kv * 4 / 1e6)
    by_flops = step.floors(config, four, slow_products, 8, 100, 10)
    assert by_flops["projections"] == pytest.approx(8 * 2 * weights / 1e6)
    assert by_flops["prefix_attention"] == pytest.approx(8 * 100 * 3 * 4 * heads / 1e6)
    assert by_flops["step"] == pytest.approx(
        sum(value for part, value in by_flops.items() if part != "step")
    )


def test_floors_of_weights_in_few_bits(tiny_model: Any) -> None:
    """Fewer bytes and twice the peak for products with weights; K/V and attention as before."""
    config = read_model_config(tiny_model)
    slow_memory, slow_products = Peak(1e9, 1e18), Peak(1e18, 1e9)
    plain, few = Precision.of("bf16", 2), Precision.of("int4", 2)
    a, b = (step.floors(config, one, slow_memory, 8, 100, 10) for one in (plain, few))
    c, d = (step.floors(config, one, slow_products, 8, 100, 10) for one in (plain, few))
    for part in ("projections", "head"):
        assert b[part] == pytest.approx(a[part] * 0.625 / 2)
        assert d[part] == pytest.approx(c[part] / 2)
    for part in ("prefix_attention", "suffix_attention"):
        assert (b[part], d[part]) == (a[part], c[part])


def test_the_largest_batch_is_held_against_32() -> None:
    times = {1: 1.0, 32: 10.0, 128: 32.0}
    timed = [(batch, 64, "greedy", {"step": ms}, 70.0) for batch, ms in times.items()]
    (row,) = step._scale(timed)
    assert (row["batch"], row["tok_s"], row["ratio"]) == (128, 4000.0, 1.25)


def test_what_the_clocks_cost_is_not_counted() -> None:
    clocks = Clocks()
    idle = clocks.timed("merge", int)
    for _ in range(100):
        idle()
    parts = clocks.end(1.0)
    assert sum(parts.values()) <= 1000.0
    assert parts["python"] > 900.0
    clocks.begin()
    assert clocks.end(0.001)["python"] == 1.0

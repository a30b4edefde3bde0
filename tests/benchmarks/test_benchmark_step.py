"""benchmarks.step on a tiny model: all parts are there, add up, and lie beside their floors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step
from benchmarks.floors import Precision, prefill_floor_s
from benchmarks.machine import Peak
from benchmarks.report import parse
from benchmarks.step_parts import PARTS, Clocks
from engine.model.model_config import read_model_config
from engine.model.weight_loading import load_weights
from engine.model.weights import LayerWeights
from kernels.quantised import Grid, QuantisedLinear

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
    assert result["int8_gemm_gop_s"] > 0


def test_no_chat_runs_ahead_while_others_are_still_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow a token of a prompt was, all chats decode after a few steps."""
    sizes = step.Sizes((60,), (130,), ("greedy",), 4, 60.0, (64,))
    argv = ["--model", str(tiny_model), "--dtype", "fp32", "--weights", "fp32"]
    options = parse(None, argv, step._add_options)
    config = read_model_config(tiny_model)
    with step.null_sender() as out:
        steps = step.Steps(options, config, sizes, None, out)
        monkeypatch.setattr("engine.chunking.ADDED_S", 0.0)  # a server would read 32 a step
        for _ in range(8):
            steps.engine.scheduler.chunk.ran(0, 64, 0.1)
        steps.begin(60, 130, step.SAMPLERS["greedy"])
        running = steps.engine.scheduler.running
        assert len(running) == 60
        assert max(len(request.output) for request in running) <= 4  # 60 * 64 tokens in two steps
        assert steps.engine.scheduler.preemptions == 0
        steps.engine.close()


def test_floors_are_bytes_or_flops_whichever_is_more(tiny_model: Any) -> None:
    config = read_model_config(tiny_model)
    slow_memory, slow_products = Peak(1e9, 1e18, 1e18), Peak(1e18, 1e9, 4e9)
    width, heads, kv = 128, 4 * 64, 2 * 64
    weights = 3 * (width * (heads + 2 * kv) + heads * width + 3 * width * 192)
    four = Precision(4.0, 4.0)
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
    """Fewer bytes, and products at the peak of bytes; K/V and attention as before."""
    config = read_model_config(tiny_model)
    slow_memory, slow_products = Peak(1e9, 1e18, 1e18), Peak(1e18, 1e9, 4e9)
    plain, few = Precision(2.0, 2.0), Precision(0.625, 2.0, head_bytes=1.0625, head_planes=2)
    a, b = (step.floors(config, one, slow_memory, 8, 100, 10) for one in (plain, few))
    c, d = (step.floors(config, one, slow_products, 8, 100, 10) for one in (plain, few))
    assert b["projections"] == pytest.approx(a["projections"] * 0.625 / 2)
    assert b["head"] == pytest.approx(a["head"] * 1.0625 / 2)
    assert d["projections"] == pytest.approx(c["projections"] / 4)
    assert d["head"] == pytest.approx(c["head"] / 2)
    for part in ("prefix_attention", "suffix_attention"):
        assert (b[part], d[part]) == (a[part], c[part])


def _four_bit(layer: LayerWeights) -> LayerWeights:
    """The layer with projections of the same shapes in 4 bits, all zeros."""

    def zeros(linear: Any) -> QuantisedLinear:
        out, inner = linear.out_features, linear.in_features
        codes = torch.zeros(out, inner, dtype=torch.uint8)
        scale = torch.zeros(out, inner // 32, dtype=torch.float16)
        return QuantisedLinear(Grid(codes, scale, scale))

    names = ("qkv", "o", "gate_up", "down")
    four: dict[str, Any] = {name: zeros(getattr(layer, name)) for name in names}
    return replace(layer, **four)


def test_weights_are_counted_as_they_are_packed(tiny_model: Path) -> None:
    """Scales, and a bias of 4 bytes for an output's 128 to 256 weights."""
    config = read_model_config(tiny_model)
    plain, eight = (
        load_weights(tiny_model, config, torch.float32, 128, format=format)
        for format in ("fp32", "int8")
    )
    four = replace(eight, layers=tuple(map(_four_bit, eight.layers)))
    found = [Precision.of_weights(weights) for weights in (plain, eight, four)]
    assert found[0] == Precision(4.0, 4.0, 4.0, 1)
    for one, weight_bytes in zip(found[1:], (1.0625, 0.625), strict=True):
        assert one.weight_bytes == pytest.approx(weight_bytes + 4 / 150, abs=4 / 600)
        assert one.head_bytes == pytest.approx(1.0625 + 4 / 128, rel=0.06)  # rows in sixteens
        assert (one.kv_bytes, one.head_planes) == (4, 2)


def test_a_prompts_floor_counts_the_head_once_and_keys_up_to_the_row(tiny_model: Any) -> None:
    config = read_model_config(tiny_model)
    width, heads, kv = 128, 4 * 64, 2 * 64
    weights = 3 * (width * (heads + 2 * kv) + heads * width + 3 * width * 192)
    pairs = 100 * 101 / 2
    flops = 2 * 100 * weights + 2 * config.vocab_size * width + 4 * 3 * heads * pairs
    slow_products = Peak(1e18, 1e9, 1e18)
    seconds = prefill_floor_s(config, Precision(4.0, 4.0), slow_products, 100)
    assert seconds == pytest.approx(flops / 1e9)


def _parts(step_ms: float, python_ms: float) -> dict[str, float]:
    return {**dict.fromkeys(PARTS, 0.0), "step": step_ms, "python": python_ms, "scheduling": 1.0}


def test_the_largest_batch_is_held_against_32() -> None:
    parts = {1: _parts(1.0, 0.5), 32: _parts(10.0, 1.0), 128: _parts(32.0, 0.6)}
    timed = [(batch, 64, "greedy", each, 70.0) for batch, each in parts.items()]
    (row,) = step._scale(timed)
    assert (row["batch"], row["tok_s"], row["ratio"]) == (128, 4000.0, 1.25)
    assert row["overhead_share"] == 0.2  # of 32 chats: 1 + 1 of 10 ms


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

"""What the benchmarks are built of: the throttle, the bounds, the comparison of results."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks import geometry, machine
from benchmarks.agreement import check_logits
from benchmarks.floors import Precision, RestoreCosts, decode_floor_s
from benchmarks.machine import Peak
from benchmarks.report import Refused, table
from benchmarks.throttle import ThrottledStream
from engine.restoration.chunk_store import LoadedStripe


@dataclass
class InstantStream:
    """Has everything at once."""

    waiting: list[LoadedStripe]
    released: int = 0
    cancelled: bool = False
    io_seconds: float = 0.0

    def poll(self, timeout_s: float = 0.0) -> list[LoadedStripe]:
        out, self.waiting = self.waiting, []
        return out

    def release(self, stripe: LoadedStripe) -> None:
        self.released += 1

    @property
    def finished(self) -> bool:
        return not self.waiting

    def cancel(self) -> None:
        self.cancelled = True


def stripes(count: int, num_bytes: int) -> list[LoadedStripe]:
    return [
        cast(
            LoadedStripe,
            SimpleNamespace(ref=SimpleNamespace(payload_bytes=num_bytes, start=i)),
        )
        for i in range(count)
    ]


def test_throttle_delivers_in_order_and_not_sooner() -> None:
    stream = ThrottledStream(InstantStream(stripes(10, 10_000)), 1e6, budget_bytes=20_000)
    began = time.perf_counter()
    assert stream.poll(0.0) == []
    got: list[LoadedStripe] = []
    while not stream.finished:
        got += stream.poll(0.02)
    assert [s.ref.start for s in got] == list(range(10))
    assert time.perf_counter() - began >= 0.1  # 100,000 bytes at 10^6 a second
    assert stream.io_seconds >= 0.1


def test_throttle_saves_up_no_more_than_the_read_ahead() -> None:
    inner = InstantStream([])
    stream = ThrottledStream(inner, 1e6, budget_bytes=20_000)
    time.sleep(0.06)  # a device that may be three stripes ahead, were it not for the budget
    inner.waiting = stripes(1, 0)
    stream.poll()
    inner.waiting = stripes(5, 20_000)
    assert len(stream.poll()) == 1


def test_throttle_cancel_gives_held_buffers_back() -> None:
    inner = InstantStream(stripes(3, 1000))
    stream = ThrottledStream(inner, 1.0, budget_bytes=2000)
    assert stream.poll() == []
    stream.cancel()
    assert inner.released == 3
    assert inner.cancelled
    assert stream.finished


def costs(bandwidth: float, flops: float) -> RestoreCosts:
    config: Any = SimpleNamespace(
        num_layers=6,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=128,
        vocab_size=100,
    )
    return RestoreCosts.of(config, 2, flops, bandwidth, prefix=10, num_tokens=100)


def test_lower_bound_is_below_every_pure_plan_and_has_the_right_limits() -> None:
    middle = costs(1e6, 1e9)
    pure = [middle.makespan(6, 0, 0), middle.makespan(0, 6, 0), middle.makespan(0, 0, 6)]
    assert 0 < middle.lower_bound() < min(pure)
    fast_disk = costs(1e15, 1e9)
    assert fast_disk.lower_bound() == pytest.approx(fast_disk.makespan(0, 0, 6))
    no_disk = costs(1e-3, 1e12)
    assert no_disk.lower_bound() == pytest.approx(no_disk.makespan(5, 1, 0))


def test_hidden_costs_half_of_kv_where_every_head_has_its_own_keys() -> None:
    one = costs(1e6, 1e9)
    assert one.io_hidden * 2 == pytest.approx(one.io_kv)


def test_decode_floor_counts_the_prefix_once_or_once_a_row() -> None:
    config: Any = SimpleNamespace(
        num_layers=2,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=16,
        vocab_size=10,
    )
    peak = Peak(1.0, 1e30, 1e30)
    params = 2 * (8 * (8 + 8) + 8 * 8 + 3 * 8 * 16) + 10 * 8
    per_token = 2 * 2 * 4 * 2
    sizes: Any = {"batch": 3, "prefix": 100, "suffix": 5}
    bf16 = Precision(2.0, 2.0)
    shared = decode_floor_s(config, bf16, peak, shared=True, **sizes)
    unshared = decode_floor_s(config, bf16, peak, shared=False, **sizes)
    products = Peak(float("inf"), 1.0, 2.0)  # bytes are multiplied twice as fast
    wide, narrow = (
        decode_floor_s(config, Precision(each, 2.0), products, shared=True, **sizes)
        for each in (2.0, 1.0)
    )
    assert wide / 2 < narrow < wide  # attention is not made faster by small weights
    assert shared == params * 2 + (100 + 15) * per_token
    assert unshared == params * 2 + (300 + 15) * per_token


def test_agreement_refuses_other_distributions_and_other_choices() -> None:
    theirs = torch.tensor([[8.0, 0.0, -2.0], [0.0, 9.0, 1.0]])
    assert check_logits("same", theirs + 1.0, theirs, torch.float32) < 1e-6  # a shift is none
    with pytest.raises(Refused, match="KL divergence"):
        check_logits("shuffled", theirs.flip(-1), theirs, torch.bfloat16)
    rows = torch.zeros(1000, 3)
    rows[:, 0] = 9.0
    other = rows.clone()
    other[7, 1] = 9.5
    assert check_logits("one row of many", other, rows, torch.bfloat16) < 1e-2
    other[:11, 1] = 9.2
    with pytest.raises(Refused, match="in 11 of 1000 rows the greedy choices"):
        check_logits("some of many", other, rows, torch.bfloat16)
    likely, turned = (
        torch.tensor([odds]).log() for odds in ([0.58, 0.38, 0.04], [0.47, 0.49, 0.04])
    )
    with pytest.raises(Refused, match="greedy choices"):
        check_logits("no tie", turned, likely, torch.bfloat16)
    moved = torch.tensor([[0.53, 0.38, 0.09]]).log()
    assert 0.015 < check_logits("one row", moved, likely, torch.bfloat16) < 0.03
    with pytest.raises(Refused, match="KL divergence"):
        check_logits("all rows", moved.expand(16, 3), likely.expand(16, 3), torch.bfloat16)
    with pytest.raises(Refused, match="finite"):
        check_logits("nan", theirs * float("nan"), theirs, torch.float32)


def test_raw_disk_reads_and_cold_files(tmp_path: Path) -> None:
    disk = machine.RawDisk(tmp_path, 8 << 20)
    disk.probe(1)
    first = disk.bytes_per_s
    assert first > 1e6
    disk.probe(1)
    assert disk.bytes_per_s >= first
    disk.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_bytes(b"x" * 5000)
    machine.drop_from_page_cache(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"x" * 5000


def test_random_models_are_complete(tmp_path: Path) -> None:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 50,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    made = geometry.write_random_model(tmp_path, config)
    assert (made.num_layers, made.head_dim, made.dtype) == (2, 8, "bf16")
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_table_aligns_columns() -> None:
    text = table([{"a": 1, "long": 2.0}, {"a": 100, "long": 3.14159}])
    assert text.splitlines() == ["  a   long", "  1      2", "100  3.142"]

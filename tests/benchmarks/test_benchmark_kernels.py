"""The kernels' benchmark: its floors by hand, and its calls read what they are to read."""

from __future__ import annotations

import torch

from benchmarks import kernels
from benchmarks.kernels import Case
from benchmarks.machine import Peak


def test_bytes_and_flops_by_hand() -> None:
    decode = Case("decode", 2, 10, 4, 2, 64)
    assert decode.num_bytes(torch.bfloat16) == 2 * 2 * 10 * (2 * 64) * 2
    assert decode.flops == 4 * 2 * 10 * 4 * 64
    assert Case("prefix", 2, 10, 4, 2, 64).num_bytes(torch.float32) == 2 * 10 * (2 * 64) * 4
    pairs = 8 + 9 + 10  # keys that three rows see, the last of them all ten
    assert Case("prefill", 3, 10, 4, 2, 64).flops == 4 * pairs * 4 * 64
    merge = Case("merge", 3, 0, 4, 2, 64)
    assert merge.num_bytes(torch.bfloat16) == 3 * 4 * 64 * (3 * 4 + 2)
    assert merge.flops == 0


def test_pages_differ_between_calls_and_a_row_holds_its_share() -> None:
    cache = kernels._Cache(1, 64, torch.bfloat16)
    first, second = cache.pages(200), cache.pages(64)
    assert len(first) == 4
    assert not set(first) & set(second)
    row = kernels._row(
        Case("decode", 1, 100, 1, 1, 64), 1e-3, torch.bfloat16, Peak(51.2e6, 1e12, 1e12)
    )
    assert row["floor_share"] == 0.5
    assert row["gbps"] == round(25_600 / 1e6, 1)


def test_every_kind_of_call_runs() -> None:
    cache = kernels._Cache(2, 64, torch.float32)
    for kernel in ("decode", "prefix", "prefill", "merge"):
        actions = kernels._actions(Case(kernel, 2, 70, 4, 2, 64), cache, torch.float32)
        assert len(actions) > 1
        actions[0]()

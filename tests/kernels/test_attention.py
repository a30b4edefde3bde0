"""Attention parts against full attention over the same keys, and against the whole by merging."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kernels import attention as fast
from kernels import attention_tile, reference
from kernels.attention import PrefillMeta, PrefixGroups
from tests.kernels.tolerances import ATTENTION, DTYPES, LARGE_SCORES, LSE, ROWS, assert_close

NUM_PAGES = 80
HEADS = [  # query heads, KV heads, head size: group sizes 1, 3, 4 and one that fills no vector
    pytest.param(9, 3, 64, id="9-3-64"),
    pytest.param(4, 4, 80, id="4-4-80"),
    pytest.param(8, 2, 128, id="8-2-128"),
    pytest.param(10, 2, 64, id="10-2-64"),
]
Case = tuple[int, int, Sequence[int], int]  # row start, row stop, pages, keys


@pytest.fixture(params=[1, 2, 3], ids=["1-thread", "2-threads", "3-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _caches(kv_heads: int, dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_PAGES * reference.PAGE_SIZE, kv_heads, dim)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    return k.to(dtype), v.to(dtype)


def _poison(k: Tensor, v: Tensor, cases: Sequence[Case]) -> None:
    """Slots that no case may look at hold NaN."""
    used = torch.zeros(k.shape[0], dtype=torch.bool)
    for _, _, pages, length in cases:
        used[reference.slots_of(pages, length)] = True
    k[~used] = float("nan")
    v[~used] = float("nan")


def _queries(rows: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Views of a wider fused row, as the projection makes them."""
    return torch.randn(rows, heads + 4, dim).to(dtype)[:, :heads]


def _states(rows: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    return torch.full((rows, heads, dim), float("nan")), torch.full((rows, heads), float("nan"))


def _pages(count: int, rng: random.Random) -> list[int]:
    return rng.sample(range(NUM_PAGES), count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 1000])
def test_prefix_of_any_length(
    heads: int, kv_heads: int, dim: int, length: int, dtype: torch.dtype, threads: int
) -> None:
    pages = _pages(-(-length // 64), random.Random(length))
    cases: list[Case] = [(2, 35, pages, length)]
    q = _queries(40, heads, dim, dtype)
    k, v = _caches(kv_heads, dim, dtype, 1)
    _poison(k, v, cases)
    out, lse = _states(40, heads, dim)
    fast.prefix_attention(q, k, v, PrefixGroups.build(cases, 40), dim**-0.5, out, lse)
    expected = reference.prefix_attention(q, k, v, cases, dim**-0.5)
    assert_close(out, expected[0], ATTENTION[dtype])
    assert_close(lse, expected[1], LSE[dtype])
    assert torch.isneginf(lse[:2]).all()
    assert torch.isneginf(lse[35:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_unequal_size_and_rows_in_none(dtype: torch.dtype, threads: int) -> None:
    rng = random.Random(3)
    cases: list[Case] = [
        (0, 1, _pages(9, rng), 550),
        (1, 3, _pages(1, rng), 1),
        (5, 6, _pages(2, rng), 100),
        (6, 131, _pages(17, rng), 1025),
        (131, 140, [], 0),
        (150, 186, list(range(4, 8)), 256),
    ]
    q = _queries(200, 9, 64, dtype)
    k, v = _caches(3, 64, dtype, 2)
    _poison(k, v, cases)
    out, lse = _states(200, 9, 64)
    fast.prefix_attention(q, k, v, PrefixGroups.build(cases, 200), 0.125, out, lse)
    expected = reference.prefix_attention(q, k, v, cases, 0.125)
    assert_close(out, expected[0], ATTENTION[dtype])
    assert_close(lse, expected[1], LSE[dtype])
    for start, stop in ((3, 5), (131, 150), (186, 200)):
        assert (out[start:stop] == 0).all()
        assert torch.isneginf(lse[start:stop]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_decode_of_unequal_lengths(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, threads: int
) -> None:
    lengths = [0, 1, 63, 64, 65, 500, 1, 0, 128, 3]
    rng = random.Random(5)
    table = torch.full((len(lengths), 9), 10**6, dtype=torch.int32)  # unused entries: no page
    cases: list[Case] = []
    for row, length in enumerate(lengths):
        pages = _pages(-(-length // 64), rng)
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        cases.append((row, row + 1, pages, length))
    q = _queries(len(lengths), heads, dim, dtype)
    k, v = _caches(kv_heads, dim, dtype, 3)
    _poison(k, v, cases)
    out, lse = _states(len(lengths), heads, dim)
    lens = torch.tensor(lengths, dtype=torch.int32)
    fast.decode_attention(q, k, v, table, lens, dim**-0.5, out, lse)
    expected = reference.decode_attention(q, k, v, table, lens, dim**-0.5)
    assert_close(out, expected[0], ATTENTION[dtype])
    assert_close(lse, expected[1], LSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_prefill_is_causal(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, threads: int
) -> None:
    lengths = [(5, 5), (1, 300), (64, 64), (33, 65), (100, 1000), (1, 1), (65, 129)]
    rng = random.Random(7)
    cases: list[Case] = []
    start = 0
    for rows, keys in lengths:
        cases.append((start, start + rows, _pages(-(-keys // 64), rng), keys))
        start += rows
    meta = PrefillMeta.build(
        [0, *(case[1] for case in cases)],
        [case[2] for case in cases],
        [keys for _, keys in lengths],
    )
    q = _queries(start, heads, dim, dtype)
    k, v = _caches(kv_heads, dim, dtype, 4)
    _poison(k, v, cases)
    out, lse = _states(start, heads, dim)
    fast.prefill_attention(q, k, v, meta, dim**-0.5, out, lse)
    expected = reference.prefill_attention(q, k, v, cases, dim**-0.5)
    assert_close(out, expected[0], ATTENTION[dtype])
    assert_close(lse, expected[1], LSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    cases: list[Case] = [(0, 4, list(range(5)), 300)]
    q = _queries(4, 3, 64, dtype) * 30
    k, v = _caches(3, 64, dtype, 5)
    out, lse = _states(4, 3, 64)
    fast.prefix_attention(q, k, v, PrefixGroups.build(cases, 4), 0.5, out, lse)
    expected = reference.prefix_attention(q, k, v, cases, 0.5)
    assert expected[1].max() > 200
    assert_close(out, expected[0], LARGE_SCORES[dtype])
    assert (lse - expected[1]).abs().max() < 1e-2


def test_bf16_without_the_processor_s_dot_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "BF16_KIND", attention_tile.BF16_WIDENED)
    cases: list[Case] = [(0, 30, [4, 9, 2, 30], 250)]
    q = _queries(30, 9, 64, torch.bfloat16)
    k, v = _caches(3, 64, torch.bfloat16, 6)
    _poison(k, v, cases)
    out, lse = _states(30, 9, 64)
    fast.prefix_attention(q, k, v, PrefixGroups.build(cases, 30), 0.125, out, lse)
    expected = reference.prefix_attention(q, k, v, cases, 0.125)
    assert_close(out, expected[0], ATTENTION[torch.float32])
    assert_close(lse, expected[1], LSE[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_levels_and_a_suffix_equal_attention_over_all_keys(dtype: torch.dtype) -> None:
    """Unequal fan-out: rows 0-5 share the root, 0-1 and 2-4 a node each, 5 has none."""
    root: Case = (0, 6, [40, 3, 17], 150)
    nodes: list[Case] = [(0, 2, [5], 1), (2, 5, [6, 7], 65)]
    lengths = [0, 3, 64, 0, 200, 65]
    table = torch.arange(20, 20 + 24, dtype=torch.int32).view(6, 4)
    q = _queries(6, 9, 64, dtype)
    k, v = _caches(3, 64, dtype, 7)
    states = [_states(6, 9, 64) for _ in range(3)]
    fast.prefix_attention(q, k, v, PrefixGroups.build([root], 6), 0.125, *states[0])
    fast.prefix_attention(q, k, v, PrefixGroups.build(nodes, 6), 0.125, *states[1])
    lens = torch.tensor(lengths, dtype=torch.int32)
    fast.decode_attention(q, k, v, table, lens, 0.125, *states[2])
    result = torch.full((6, 9, 64), float("nan")).to(dtype)
    fast.merge_states(states, result)
    for row in range(6):
        slots = [reference.slots_of(root[2], root[3])]
        slots += [reference.slots_of(n[2], n[3]) for n in nodes if n[0] <= row < n[1]]
        slots.append(reference.slots_of(table[row].tolist(), lengths[row]))
        keys = torch.cat(slots)
        whole, _ = reference.attention(q[row : row + 1], k[keys], v[keys], 0.125)
        assert_close(result[row : row + 1], whole, ROWS[dtype])


def test_metadata_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ValueError, match="65 tokens do not fit in 1 pages"):
        PrefixGroups.build([(0, 1, [3], 65)], 1)
    with pytest.raises(ValueError, match=r"rows \[1, 3\)"):
        PrefixGroups.build([(0, 2, [3], 5), (1, 3, [4], 5)], 4)
    with pytest.raises(ValueError, match=r"rows \[0, 5\)"):
        PrefixGroups.build([(0, 5, [3], 5)], 4)
    with pytest.raises(ValueError, match="2 keys are fewer than the 3 query rows"):
        PrefillMeta.build([0, 3], [[1]], [2])


def test_kernels_refuse_other_layouts() -> None:
    k = torch.zeros(64, 1, 64)
    groups = PrefixGroups.build([(0, 2, [0], 5)], 2)
    out, lse = _states(2, 1, 64)
    q = torch.zeros(2, 1, 64)
    with pytest.raises(ValueError, match="float64"):
        fast.prefix_attention(q.double(), k, k, groups, 1.0, out, lse)
    with pytest.raises(ValueError, match="3 rows"):
        fast.prefix_attention(torch.zeros(3, 1, 64), k, k, groups, 1.0, out, lse)
    with pytest.raises(ValueError, match="contiguous"):
        fast.prefix_attention(q, k, k, groups, 1.0, out.transpose(0, 2), lse)

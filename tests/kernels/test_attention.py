"""Each attention part against full attention over the same keys."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kernels import attention as fast
from kernels import reference
from kernels.spans import PAGE_SIZE, Spans
from tests.kernels.cases import HEADS, SpanCase, caches, poison, queries, segment, states
from tests.kernels.tolerances import ATTENTION, DTYPES, LARGE_SCORES, LSE, assert_close

Kernel = Callable[[Tensor, Tensor, Tensor, Spans, float, Tensor, Tensor], None]


@pytest.fixture(params=[1, 2, 3], ids=["1-thread", "2-threads", "3-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _check(
    kernel: Kernel, cases: Sequence[SpanCase], heads: int, kv_heads: int, dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """The kernel equals the reference on the cases' rows, and leaves all others alone."""
    rows = cases[-1][1] + 3
    spans = Spans.build(cases, state=1)
    q = queries(rows, heads, dim, dtype)
    k, v = caches(kv_heads, dim, dtype)
    poison(k, v, [spans])
    out, lse = states(3, rows, heads, dim)
    kernel(q, k, v, spans, dim**-0.5, out, lse)
    expected, expected_lse = states(3, rows, heads, dim)
    reference.span_attention(q, k, v, spans, dim**-0.5, expected, expected_lse)
    written = torch.zeros(3, rows, dtype=torch.bool)
    for start, stop, _, _ in cases:
        written[1, start:stop] = True
    assert_close(out[written], expected[written], ATTENTION[dtype])
    assert_close(lse[written], expected_lse[written], LSE[dtype])
    assert out[~written].isnan().all()
    assert lse[~written].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 1000])
def test_prefix_of_any_length(
    heads: int, kv_heads: int, dim: int, length: int, dtype: torch.dtype
) -> None:
    rng = random.Random(length)
    cases: list[SpanCase] = [
        (2, 35, [segment(length, rng)], False),
        (35, 36, [segment(length, rng)], False),
    ]
    _check(fast.prefix_attention, cases, heads, kv_heads, dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_unequal_size(dtype: torch.dtype, threads: int) -> None:
    rng = random.Random(3)
    cases: list[SpanCase] = [
        (0, 1, [segment(550, rng)], False),
        (1, 3, [segment(1, rng)], False),
        (5, 6, [segment(100, rng)], False),
        (6, 131, [segment(1025, rng)], False),
        (131, 140, [], False),
        (150, 186, [(list(range(4, 8)), 256)], False),
    ]
    _check(fast.prefix_attention, cases, 9, 3, 64, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_decode_of_unequal_lengths_and_segments(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, threads: int
) -> None:
    rng = random.Random(5)
    lengths = [
        [], [1], [63], [64], [65], [500], [1, 1], [64, 64], [65, 0, 3], [1, 130, 7, 300], [3],
        [0, 0], [200, 1000], [129, 127, 128],
    ]  # fmt: skip
    cases: list[SpanCase] = [
        (row, row + 1, [segment(tokens, rng) for tokens in each], False)
        for row, each in enumerate(lengths)
    ]
    _check(fast.decode_attention, cases, heads, kv_heads, dim, dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 13, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_of_decode_rows(rows: int, dtype: torch.dtype, threads: int) -> None:
    rng = random.Random(rows)
    cases: list[SpanCase] = [
        (row, row + 1, [segment(rng.randrange(0, 700), rng)], False) for row in range(rows)
    ]
    _check(fast.decode_attention, cases, 8, 2, 64, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_prefill_is_causal(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, threads: int
) -> None:
    rng = random.Random(7)
    sizes = [
        (5, [5]), (1, [300]), (64, [64]), (33, [65]), (100, [1000]), (1, [1]), (65, [129]),
        (2, [2]), (3, [130, 3]), (40, [65, 1, 40]), (70, [1, 200]), (200, [127, 230]),
        (20, [30, 0, 10, 10]),
    ]  # fmt: skip
    cases: list[SpanCase] = []
    start = 0
    for rows, tokens in sizes:
        cases.append((start, start + rows, [segment(each, rng) for each in tokens], True))
        start += rows
    _check(fast.prefill_attention, cases, heads, kv_heads, dim, dtype)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_neither_overflow_nor_vanish(dtype: torch.dtype, rows: int, sign: int) -> None:
    """Every score of a row is near +-240 or beyond: its softmax is taken all the same."""
    spans = Spans.build([(0, rows, [(list(range(5)), 300)], False)])
    q = queries(rows, 3, 64, dtype)
    k, v = caches(3, 64, dtype)
    q = (q * 3).to(dtype)
    k = (k * 4 + sign * q[0, :3] * 3).to(dtype)  # along, or against, the first row
    out, lse = states(1, rows, 3, 64)
    fast.prefix_attention(q, k, v, spans, 0.5, out, lse)
    expected, expected_lse = states(1, rows, 3, 64)
    reference.span_attention(q, k, v, spans, 0.5, expected, expected_lse)
    assert (expected_lse * sign)[0, 0].min() > 200
    assert_close(out, expected, LARGE_SCORES[dtype])
    assert (lse - expected_lse).abs().max() < 1e-2


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_beyond_two_gigabytes(dtype: torch.dtype, rows: int) -> None:
    """Byte offsets, and element offsets, that 32 bits do not hold; only what is read is touched."""
    num_pages = (2**31 // (8 * 256 * PAGE_SIZE)) + 40  # of elements
    cache = torch.empty(num_pages * PAGE_SIZE, 8, 256, dtype=dtype)
    small = torch.randn(4 * PAGE_SIZE, 8, 256).to(dtype)
    pages = [num_pages - 1, num_pages // 2, 5, num_pages - 20]
    for i, page in enumerate(pages):
        cache[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = small[i * PAGE_SIZE :][:PAGE_SIZE]
    q = queries(rows, 8, 256, dtype)
    results = []
    for source, ids in ((cache, pages), (small, [0, 1, 2, 3])):
        out, lse = states(1, rows, 8, 256)
        spans = Spans.build([(0, rows, [(ids, 200)], False)])
        fast.prefix_attention(q, source, source, spans, 0.0625, out, lse)
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_kernels_refuse_other_layouts() -> None:
    k = torch.zeros(64, 1, 64)
    spans = Spans.build([(0, 2, [([0], 5)], False)])
    out, lse = states(1, 2, 1, 64)
    q = torch.zeros(2, 1, 64)
    with pytest.raises(ValueError, match="float64"):
        fast.prefix_attention(q.double(), k, k, spans, 1.0, out, lse)
    with pytest.raises(ValueError, match="bfloat16"):
        fast.prefix_attention(q, k.bfloat16(), k, spans, 1.0, out, lse)
    with pytest.raises(ValueError, match="do not fit"):
        fast.prefix_attention(torch.zeros(3, 1, 64), k, k, spans, 1.0, out, lse)
    with pytest.raises(ValueError, match="contiguous"):
        fast.prefix_attention(q, k, k, spans, 1.0, states(1, 2, 2, 64)[0][:, :, :1], lse)
    with pytest.raises(ValueError, match=r"rows \[0, 2\) of state 1"):
        fast.prefix_attention(q, k, k, Spans.groups([[]], 2), 1.0, out, lse)
    with pytest.raises(ValueError, match=r"rows \[2, 3\) of state 0"):
        fast.prefix_attention(q, k, k, Spans.build([(2, 3, [], False)]), 1.0, out, lse)
    assert out.isnan().all()

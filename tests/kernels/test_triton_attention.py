"""Attention on CUDA against full attention over the concatenated keys."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.spans import PAGE_SIZE, Segment, Spans
from kernels.triton_spans import AttentionShape, DeviceSpans, SpanLimits
from tests.kernels.cases import Node, lay_out
from tests.kernels.tolerances import ATTENTION, LARGE_SCORES, LSE, ROWS, assert_close
from tests.kernels.triton_cases import (
    CUDA,
    FP16,
    NAN,
    NUM_PAGES,
    ONE_PLACE,
    PLACES,
    Pages,
    Place,
    all_to_device,
    caches,
    check_spans,
    nan_states,
    queries,
)

pytest.importorskip("triton")

ONE_SPLIT = 1  # programs: nothing is cut
HEADS = [  # query heads, KV heads, head size
    pytest.param((3, 3, 64), id="group1-64"),
    pytest.param((6, 2, 80), id="group3-80"),
    pytest.param((4, 1, 96), id="group4-96"),
    pytest.param((7, 1, 128), id="group7-128"),
    pytest.param((2, 2, 256), id="group1-256"),
]


def _groups(pages: Pages, *groups: tuple[int, int]) -> Spans:
    """Groups of (rows, tokens), one after another."""
    spans, at = [], 0
    for rows, tokens in groups:
        spans.append((at, at + rows, [pages.segment(tokens)], False))
        at += rows
    return Spans.build(spans)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("heads", HEADS)
def test_prefix_lengths_around_a_page(place: Place, heads: tuple[int, int, int]) -> None:
    """Groups on 0, 1, 63, 64 and 65 keys, with different numbers of rows, in one launch."""
    spans = _groups(Pages(), (2, 65), (1, 0), (3, 63), (1, 64), (2, 1))
    check_spans(place, heads, 9, 1, spans, ONE_SPLIT)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 5, 30, 70])
def test_blocks_of_all_sizes_on_a_long_prefix(place: Place, rows: int) -> None:
    """16, 32, 64 and 128 rows with the heads folded in (fewer in fp32), the last block not full."""
    spans = _groups(Pages(), (rows, 500), (1, 20))
    made = check_spans(place, (3, 1, 64), rows + 1, 1, spans, ONE_SPLIT)
    assert made.block_rows == {1: 16, 5: 16, 30: 128, 70: 128}[rows] or place.dtype == torch.float32


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows", [1, 9])
def test_few_rows_are_split_over_the_prefix(place: Place, rows: int) -> None:
    spans = _groups(Pages(), (rows, 641), (2, 100), (1, 0))
    made = check_spans(place, (4, 2, 64), rows + 3, 1, spans, 12)
    splits = made.joins[:, 4]
    assert len(splits) >= rows
    assert splits.max() >= 4


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("programs", [ONE_SPLIT, 20])
def test_decode_reads_segments_as_one_sequence(place: Place, programs: int) -> None:
    """Rows with unequal numbers of segments, which end anywhere within a page."""
    pages = Pages()
    lists: list[list[Segment]] = [
        [pages.segment(65), pages.segment(1), pages.segment(130)],
        [pages.segment(200)],
        [],
        [pages.segment(64), pages.segment(3)],
        [pages.segment(1)],
    ]
    spans = Spans.build([(row, row + 1, each, False) for row, each in enumerate(lists)])
    made = check_spans(place, (6, 2, 64), 5, 1, spans, programs)
    assert (len(made.joins) > 0) == (programs > ONE_SPLIT)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("heads", "programs"),
    [((3, 1, 64), ONE_SPLIT), ((3, 1, 64), 12), ((1, 1, 80), 12)],
    ids=["group3-64", "group3-64-split", "group1-80-split"],
)
def test_causal_prefill_of_ragged_sequences(
    place: Place, heads: tuple[int, int, int], programs: int
) -> None:
    """From the first token, after a history, after two nodes, and one row; parts without keys."""
    pages = Pages()
    spans = Spans.build(
        [
            (0, 66, [pages.segment(66)], True),
            (66, 70, [pages.segment(130)], True),
            (70, 90, [pages.segment(63), pages.segment(70)], True),
            (90, 91, [pages.segment(1)], True),
        ]
    )
    check_spans(place, heads, 91, 1, spans, programs)


@pytest.mark.parametrize("place", ONE_PLACE)
def test_causal_rows_that_see_no_key_are_empty(place: Place) -> None:
    """Rows before the first key: a part of a split chunk has such rows too."""
    pages = Pages()
    spans = Spans.build([(0, 40, [pages.segment(300)], False)])
    spans.rows[0, 2] = -10
    made = check_spans(place, (2, 1, 64), 40, 1, spans, ONE_SPLIT)
    assert made.items[0, 2] == -10


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("factor", [40.0, -40.0])
def test_large_scores(place: Place, factor: float) -> None:
    """Scores of hundreds: their exponentials overflow unless the maximum is taken off."""
    spans = _groups(Pages(), (2, 300), (1, 65))
    check_spans(place, (4, 2, 64), 3, 1, spans, 8, factor, LARGE_SCORES[place.dtype])


@pytest.mark.parametrize("place", ONE_PLACE)
@pytest.mark.parametrize("level", [-50.0, 50.0])
def test_lse_of_fifty(place: Place, level: float) -> None:
    """Every score is `level`: the LSE is level + log n, in natural units."""
    from kernels.triton_attention import prefix_attention

    pages = Pages()
    spans = Spans.build([(0, 2, [pages.segment(130)], False)])
    q, k = torch.zeros(2, 2, 64), torch.zeros(NUM_PAGES * PAGE_SIZE, 1, 64)
    q[..., 0], k[..., 0] = level, 1.0
    v = torch.randn(k.shape)
    out, lse = nan_states(1, 2, 2, 64, place.device)
    shape = AttentionShape(2, 1, 64, place.dtype)
    made = DeviceSpans.of(spans, shape, place.device, 4)
    tensors = all_to_device(q, k, v, place)
    prefix_attention(*tensors, made, 1.0, out, lse)
    torch.testing.assert_close(lse.cpu()[0], torch.full((2, 2), level + math.log(130)))


def _trees(pages: Pages) -> tuple[list[list[Node]], list[list[Node]]]:
    """Two trees, up to three levels, unequal fan-out; nodes of 0, 1, 64 and 65 tokens."""
    trees = [
        Node(
            65,
            [
                Node(1, [Node(64, leaves=2), Node(30, leaves=1)]),
                Node(0, leaves=3),
                Node(70, [Node(10, leaves=1)], leaves=1),
            ],
            leaves=1,
        ),
        Node(128, [Node(5, leaves=4)]),
    ]
    levels, paths = lay_out(trees, random.Random(0))
    for level in levels:
        for node in level:
            node.pages = list(pages.segment(node.tokens)[0])
    return levels, paths


@pytest.mark.parametrize("place", PLACES)
def test_levels_of_trees_and_suffixes_merge_to_full_attention(place: Place) -> None:
    from kernels import triton_attention, triton_merge

    heads, kv_heads, dim = 4, 2, 64
    pages = Pages()
    levels, paths = _trees(pages)
    own = [pages.segment(tokens) for tokens in (1, 64, 65, 3, 2, 9, 5, 30, 63, 8, 66, 1, 7, 20)]
    rows = len(own)
    assert rows == len(paths) + 1  # the last row has no shared node
    shared = Spans.groups(
        [[(node.start, node.stop, node.pages, node.tokens) for node in each] for each in levels],
        rows,
    )
    suffixes = Spans.build([(row, row + 1, [own[row]], False) for row in range(rows)])
    q = queries(rows, heads, dim, place)
    k, v = caches(kv_heads, dim, place, [shared, suffixes])
    out, lse = nan_states(1 + len(levels), rows, heads, dim, place.device)
    shape = AttentionShape(heads, kv_heads, dim, place.dtype)
    tensors = all_to_device(q, k, v, place)
    scale = dim**-0.5
    for spans, attend in (
        (suffixes, triton_attention.decode_attention),
        (shared, triton_attention.prefix_attention),
    ):
        made = DeviceSpans.of(spans, shape, place.device, 8)
        attend(*tensors, made, scale, out, lse)
    result = torch.full((rows, heads * dim), NAN, dtype=place.dtype, device=place.device)
    triton_merge.merge_states(out, lse, result)
    for row in range(rows):
        path = [(node.pages, node.tokens) for node in (paths[row] if row < len(paths) else [])]
        slots = torch.cat([reference.slots_of(*each) for each in [*path, own[row]]])
        expected, _ = reference.attention(q[row : row + 1], k[slots], v[slots], scale)
        assert_close(result[row].cpu().view(1, heads, dim), expected, ROWS[place.dtype])


@pytest.mark.parametrize("place", PLACES)
def test_refilled_in_place_for_a_captured_graph(place: Place) -> None:
    """Same addresses and grid, other rows, lengths and pages; unused entries write nothing."""
    from kernels.triton_attention import decode_attention

    heads, kv_heads, dim, rows = 4, 2, 64, 4
    shape = AttentionShape(heads, kv_heads, dim, place.dtype)
    limits = SpanLimits(rows=4, span_rows=2, spans=4, depth=2, pages=16)
    made = DeviceSpans(shape, limits, place.device, 8)
    before = [x.data_ptr() for x in (made.items, made.joins, made.segments, made.pages)]
    sizes = [list(x.shape) for x in (made.items, made.joins, made.segments, made.pages)]
    q = queries(rows, heads, dim, place)
    fillings: list[list[tuple[int, int, list[int]]]] = [
        [(0, 1, [65, 1]), (1, 2, [640]), (2, 4, [3])],
        [(0, 1, [66, 1]), (1, 2, []), (2, 3, [64, 64]), (3, 4, [7])],
        [(1, 3, [300])],
        [],
    ]
    for seed, filling in enumerate(fillings):
        pages = Pages(seed)
        spans = Spans.build(
            [
                (start, stop, [pages.segment(n) for n in each], False)
                for start, stop, each in filling
            ]
        )
        k, v = caches(kv_heads, dim, place, [spans])
        out, lse = nan_states(1, rows, heads, dim, place.device)
        made.fill(spans)
        decode_attention(*all_to_device(q, k, v, place), made, 0.125, out, lse)
        expected, expected_lse = nan_states(1, rows, heads, dim, "cpu")
        reference.span_attention(q, k, v, spans, 0.125, expected, expected_lse)
        torch.testing.assert_close(out.cpu(), expected, atol=8e-3, rtol=0, equal_nan=True)
        torch.testing.assert_close(lse.cpu(), expected_lse, atol=4e-3, rtol=0, equal_nan=True)
    assert before == [x.data_ptr() for x in (made.items, made.joins, made.segments, made.pages)]
    assert sizes == [list(x.shape) for x in (made.items, made.joins, made.segments, made.pages)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_replays_with_other_spans() -> None:
    from kernels.triton_attention import decode_attention

    place = Place("cuda", torch.bfloat16)
    shape = AttentionShape(8, 2, 128, place.dtype)
    made = DeviceSpans(shape, SpanLimits(rows=4, span_rows=1, spans=4, depth=1, pages=24), "cuda")
    q = queries(4, 8, 128, place)
    k, v = (torch.randn(NUM_PAGES * PAGE_SIZE, 2, 128).to(place.dtype) for _ in range(2))
    tensors = all_to_device(q, k, v, place)
    out, lse = nan_states(1, 4, 8, 128, "cuda")
    graph = torch.cuda.CUDAGraph()
    for index, lengths in enumerate([(5, 64, 65, 700), (6, 65, 66, 701), (700, 1, 0, 64)]):
        pages = Pages(index)
        spans = Spans.build(
            [(row, row + 1, [pages.segment(n)], False) for row, n in enumerate(lengths)]
        )
        made.fill(spans)
        if index == 0:
            decode_attention(*tensors, made, 0.1, out, lse)  # compile
            with torch.cuda.graph(graph):
                decode_attention(*tensors, made, 0.1, out, lse)
        graph.replay()
        expected, expected_lse = nan_states(1, 4, 8, 128, "cpu")
        reference.span_attention(q, k, v, spans, 0.1, expected, expected_lse)
        torch.testing.assert_close(out.cpu(), expected, atol=8e-3, rtol=0)
        torch.testing.assert_close(lse.cpu(), expected_lse, atol=4e-3, rtol=0)


@pytest.mark.parametrize("place", [FP16, CUDA[0]])
def test_addresses_beyond_32_bits(place: Place) -> None:
    """A page whose first element is number 2^31 + 2^30 of its cache; only it is ever touched."""
    from kernels.triton_attention import prefix_attention

    heads, dim = 16, 256
    page = 3 * (1 << 30) // (PAGE_SIZE * heads * dim)
    shape = ((page + 1) * PAGE_SIZE, heads, dim)
    cache = torch.empty(shape, dtype=place.dtype, device=place.device)
    keys = torch.randn(PAGE_SIZE, heads, dim).to(place.dtype)
    cache[page * PAGE_SIZE :] = keys.to(place.device)
    spans = Spans.build([(0, 1, [([page], 60)], False)])
    made = DeviceSpans.of(spans, AttentionShape(heads, heads, dim, place.dtype), place.device, 4)
    q = torch.randn(1, heads, dim).to(place.dtype)
    out, lse = nan_states(1, 1, heads, dim, place.device)
    prefix_attention(q.to(place.device), cache, cache, made, 0.06, out, lse)
    expected, expected_lse = reference.attention(q, keys[:60], keys[:60], 0.06)
    assert_close(out[0].cpu(), expected, ATTENTION[place.dtype])
    assert_close(lse[0].cpu(), expected_lse, LSE[place.dtype])


def test_what_the_kernel_cannot_do_is_refused() -> None:
    from kernels.triton_attention import span_attention

    spans = Spans.build([(0, 3, [([1], 5)], False)])
    shape = AttentionShape(2, 1, 64, torch.float32)
    made = DeviceSpans.of(spans, shape, "cpu", 4)
    cache = torch.zeros(128, 1, 64)

    def run(q: Tensor, k: Tensor, scale: float = 1.0) -> None:
        out, lse = torch.zeros(1, *q.shape), torch.zeros(1, *q.shape[:2])
        span_attention(q, k, k, made, scale, out, lse)

    with pytest.raises(ValueError, match="spans up to"):
        run(torch.zeros(2, 2, 64), cache)
    with pytest.raises(ValueError, match="spans up to"):
        run(torch.zeros(3, 2, 64), cache[:64])
    with pytest.raises(ValueError, match="spans for"):
        run(torch.zeros(3, 4, 64), cache)
    with pytest.raises(ValueError, match=r"scale 0\.0"):
        run(torch.zeros(3, 2, 64), cache, 0.0)
    with pytest.raises(ValueError, match="head_dim 72"):
        run(torch.zeros(3, 2, 72), torch.zeros(128, 1, 72))
    with pytest.raises(ValueError, match="do not fit"):
        run(torch.zeros(3, 2, 64), torch.zeros(128, 1, 80))
    with pytest.raises(ValueError, match="float16 keys"):
        run(torch.zeros(3, 2, 64), cache.half())
    with pytest.raises(ValueError, match="contiguous"):
        run(torch.zeros(3, 64, 2).transpose(1, 2), cache)
    with pytest.raises(ValueError, match="contiguous"):
        run(torch.zeros(3, 2, 64), torch.zeros(128, 2, 64)[:, :1])

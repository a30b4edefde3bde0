"""How spans are cut into items: every key of every row once, evenly, within the promised room."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.spans import PAGE_SIZE, Segment, Spans
from kernels.triton_spans import AttentionShape, DeviceSpans, SpanLimits, block_rows

SHAPES = [
    AttentionShape(9, 3, 64, torch.bfloat16),
    AttentionShape(8, 8, 128, torch.bfloat16),
    AttentionShape(14, 2, 256, torch.float32),
]
TOKENS = st.sampled_from([0, 1, 63, 64, 65, 300, 2000])


@st.composite
def _spans(draw: st.DrawFn) -> Spans:
    rows: list[tuple[int, int, list[Segment], bool]] = []
    at = 0
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 2))
        lengths = draw(st.lists(TOKENS, max_size=3))
        segments: list[Segment] = [(range(40), tokens) for tokens in lengths]
        count = draw(st.sampled_from([1, 2, 50, 200]))
        causal = draw(st.booleans()) and count <= sum(lengths)
        rows.append((at, at + count, segments, causal))
        at += count
    return Spans.build(rows)


def _work(spans: Spans, made: DeviceSpans) -> dict[tuple[int, int, int], int]:
    """How often each (span, row, tile) that the row sees is covered by an item."""
    covered: dict[tuple[int, int, int], int] = {}
    for first, stop, _base, state, span, low, high, _part in made.items.tolist():
        assert stop - first <= made.block_rows // made.shape.group
        assert state == (0 if first == stop else spans.rows[span, 3])
        for row in range(first, stop):
            for tile in range(low, high):
                covered[span, row, tile] = covered.get((span, row, tile), 0) + 1
    return covered


@settings(max_examples=80, deadline=None)
@given(spans=_spans(), shape=st.sampled_from(SHAPES), programs=st.sampled_from([1, 24, 264]))
def test_each_tile_once_and_within_limits(
    spans: Spans, shape: AttentionShape, programs: int
) -> None:
    count, depth = spans.segments.shape[:2]
    tokens = spans.rows[:, 1] - spans.rows[:, 0]
    limits = SpanLimits(
        rows=int(tokens.sum()),
        span_rows=int(tokens.max(initial=1)),
        spans=count,
        depth=depth,
        pages=len(spans.pages),
    )
    made = DeviceSpans(shape, limits, "cpu", programs)
    made.fill(spans)  # whatever the spans are, the limits are room enough
    covered = _work(spans, made)
    assert set(covered.values()) <= {1}
    parts: set[int] = set()
    for first, stop, _base, _state, _span, low, high, part in made.items.tolist():
        if first < stop and part >= 0:
            assert low < high
            rows = set(range(part, part + stop - first))
            assert not rows & parts
            parts |= rows
    joined = [
        first + step * index
        for _row, _state, first, step, number in made.joins.tolist()
        for index in range(number)
    ]
    assert sorted(joined) == sorted(parts)
    assert len(made.part_lse) > max(parts, default=-1)
    for index, (start, stop, base, _state) in enumerate(spans.rows.tolist()):
        lengths = spans.segments[index, :, 1]
        tiles = -(-lengths // PAGE_SIZE)
        before = np.cumsum(lengths) - lengths
        for row in {start, (start + stop) // 2, stop - 1}:
            seen = np.clip(base + row + 1 - before, 0, lengths)
            needed = [
                tile + int(tiles[:segment].sum())
                for segment in range(depth)
                for tile in range(-(-int(seen[segment]) // PAGE_SIZE))
            ]
            assert all((index, row, tile) in covered for tile in needed)


def test_one_long_group_keeps_all_multiprocessors_busy() -> None:
    """16 rows on 8,192 keys: with two KV heads, items for most of 64 programs, none longer."""
    shape = AttentionShape(2, 2, 64, torch.bfloat16)
    spans = Spans.build([(0, 16, [(range(128), 8192)], False), (16, 17, [(range(2), 70)], False)])
    made = DeviceSpans.of(spans, shape, "cpu", programs=64)
    lengths = (made.items[:, 6] - made.items[:, 5]).tolist()
    assert lengths == [5] * 24 + [4] * 2 + [2]


def test_blocks_fold_the_heads_in() -> None:
    half = [AttentionShape(12, kv, dim, torch.bfloat16) for kv, dim in ((12, 128), (4, 64))]
    wide = AttentionShape(12, 4, 256, torch.bfloat16)
    single = AttentionShape(12, 4, 64, torch.float32)
    assert [block_rows(rows, half[0]) for rows in (1, 16, 17, 100, 1000)] == [16, 16, 32, 128, 128]
    assert [block_rows(rows, half[1]) for rows in (1, 5, 6, 1000)] == [16, 16, 32, 128]
    assert block_rows(1000, wide) == 64
    assert block_rows(1000, single) == 32
    assert block_rows(1, AttentionShape(71, 1, 64, torch.bfloat16)) == 128  # Falcon's group


def test_more_than_the_limits_is_refused() -> None:
    shape = AttentionShape(2, 1, 64, torch.bfloat16)
    limits = SpanLimits(rows=40, span_rows=20, spans=2, depth=1, pages=4)
    made = DeviceSpans(shape, limits, "cpu", programs=4)
    pages: Segment = ([7], 5)
    with pytest.raises(ValueError, match="21 rows in a span, room for 20"):
        made.fill(Spans.build([(0, 21, [pages], False)]))
    with pytest.raises(ValueError, match="3 spans, room for 2"):
        made.fill(Spans.build([(row, row + 1, [pages], False) for row in range(3)]))
    with pytest.raises(ValueError, match="2 segments of a span, room for 1"):
        made.fill(Spans.build([(0, 1, [pages, pages], False)]))
    with pytest.raises(ValueError, match="5 pages, room for 4"):
        made.fill(Spans.build([(0, 1, [(range(5), 300)], False)]))
    assert not made.items.any()
    made.fill(Spans.build([(0, 20, [pages], False), (20, 40, [], False)]))
    assert (made.row_stop, made.state_stop, made.page_stop) == (40, 1, 8)

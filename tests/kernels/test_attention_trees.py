"""Trees of shared nodes: parts of every level, merged, are the attention over all keys."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import attention as fast
from kernels.spans import Segment, Spans
from tests.kernels.cases import (
    Node,
    SpanCase,
    caches,
    lay_out,
    poison,
    queries,
    segment,
    states,
    whole_attention,
)
from tests.kernels.tolerances import DTYPES, ROWS, assert_close

TOKENS = st.sampled_from([0, 1, 2, 63, 64, 65, 100, 128, 129, 300])
GEOMETRY = st.sampled_from(
    [(3, 1, 64), (9, 3, 64), (2, 2, 80), (8, 1, 96), (5, 1, 128), (1, 1, 256)]
)


def _nodes(depth: int) -> st.SearchStrategy[Node]:
    """Nodes with up to `depth` levels, themselves counted, and unequal fan-out."""
    children = st.lists(_nodes(depth - 1), max_size=3) if depth > 1 else st.just([])
    return st.builds(Node, TOKENS, children, st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(
    trees=st.lists(_nodes(4), max_size=3),
    alone=st.integers(0, 3),
    shared_levels=st.integers(0, 4),
    geometry=GEOMETRY,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_trees_of_any_shape(
    trees: list[Node],
    alone: int,
    shared_levels: int,
    geometry: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Rows below several trees and rows below none; levels not shared are read by each row."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    levels, paths = lay_out(trees, rng)
    paths.extend([[]] * alone)
    rows = len(paths)
    if not rows:
        return
    heads, kv_heads, dim = geometry
    own = [segment(rng.choice([0, 1, 5, 64, 70, 200]), rng) for _ in range(rows)]
    shared = levels[:shared_levels]
    groups = Spans.groups(
        [[(node.start, node.stop, node.pages, node.tokens) for node in level] for level in shared],
        rows,
    )
    singles: list[SpanCase] = []
    everything: list[list[Segment]] = []
    for row, path in enumerate(paths):
        read = [(node.pages, node.tokens) for node in path]
        everything.append([*read, own[row]])
        singles.append((row, row + 1, [*read[shared_levels:], own[row]], False))
    suffixes = Spans.build(singles)
    q = queries(rows, heads, dim, dtype)
    k, v = caches(kv_heads, dim, dtype)
    poison(k, v, [groups, suffixes])
    out, lse = states(1 + len(shared), rows, heads, dim)
    fast.prefix_attention(q, k, v, groups, dim**-0.5, out, lse)
    fast.decode_attention(q, k, v, suffixes, dim**-0.5, out, lse)
    result = torch.full((rows, heads * dim), float("nan")).to(dtype)
    fast.merge_states(out, lse, result)
    expected, _ = whole_attention(q, k, v, everything, dim**-0.5)
    assert_close(result, expected.view(rows, -1), ROWS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 5, 33, 64])
def test_batches_below_one_root_and_unequal_branches(batch: int, dtype: torch.dtype) -> None:
    """The root is read by all, a branch by half of the rows, another by one; in one launch."""
    rng = random.Random(batch)
    half = batch // 2
    children = [Node(65, leaves=half), Node(1, leaves=1)] if half else []
    root = Node(1000, children, batch - half - 1 if half else batch)
    levels, paths = lay_out([root], rng)
    groups = Spans.groups(
        [[(node.start, node.stop, node.pages, node.tokens) for node in level] for level in levels],
        batch,
    )
    own = [segment(rng.randrange(130), rng) for _ in range(batch)]
    suffixes = Spans.build([(row, row + 1, [own[row]], False) for row in range(batch)])
    q = queries(batch, 9, 64, dtype)
    k, v = caches(3, 64, dtype)
    poison(k, v, [groups, suffixes])
    out, lse = states(1 + len(levels), batch, 9, 64)
    fast.prefix_attention(q, k, v, Spans.join([suffixes, groups]), 0.125, out, lse)
    result = torch.full((batch, 9, 64), float("nan")).to(dtype)
    fast.merge_states(out, lse, result)
    everything = [
        [*((node.pages, node.tokens) for node in path), own[row]] for row, path in enumerate(paths)
    ]
    assert_close(result, whole_attention(q, k, v, everything, 0.125)[0], ROWS[dtype])

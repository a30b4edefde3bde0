"""Inputs of the attention tests: caches whose unread slots are NaN, trees, and the answer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.spans import PAGE_SIZE, Segment, Spans

NUM_PAGES = 160
HEADS = [  # query heads, KV heads, head size: all sizes and group sizes
    pytest.param(9, 3, 64, id="group3-64"),
    pytest.param(4, 4, 80, id="group1-80"),
    pytest.param(5, 1, 96, id="group5-96"),
    pytest.param(16, 2, 128, id="group8-128"),
    pytest.param(4, 2, 256, id="group2-256"),
    pytest.param(14, 2, 64, id="group7-64"),
    pytest.param(16, 1, 64, id="group16-64"),
]
SpanCase = tuple[int, int, Sequence[Segment], bool]  # row start, row stop, segments, causal


def pages_for(tokens: int, rng: random.Random) -> list[int]:
    """Pages for so many tokens, anywhere in the cache."""
    return rng.sample(range(NUM_PAGES), -(-tokens // PAGE_SIZE))


def segment(tokens: int, rng: random.Random) -> Segment:
    return pages_for(tokens, rng), tokens


def caches(kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (NUM_PAGES * PAGE_SIZE, kv_heads, dim)
    k, v = (torch.randn(shape).to(dtype) for _ in range(2))
    return k, v


def poison(k: Tensor, v: Tensor, spans: Iterable[Spans]) -> None:
    """Slots that no span reads hold NaN."""
    used = torch.zeros(k.shape[0], dtype=torch.bool)
    for each in spans:
        for segments in each.segments.tolist():
            for at, tokens in segments:
                used[reference.slots_of(each.pages[at:].tolist(), tokens)] = True
    k[~used] = float("nan")
    v[~used] = float("nan")


def queries(rows: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Views of a wider fused row, as the projection makes them."""
    return torch.randn(rows, heads + 4, dim).to(dtype)[:, :heads]


def states(count: int, rows: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """States of NaN: a kernel has to write what it is to write."""
    nan = float("nan")
    return torch.full((count, rows, heads, dim), nan), torch.full((count, rows, heads), nan)


@dataclass
class Node:
    """A node of a tree: its keys, its rows once known, and the level below it."""

    tokens: int
    children: list[Node] = field(default_factory=list)
    leaves: int = 0  # rows that end here; they come before those of the children
    pages: list[int] = field(default_factory=list)
    start: int = 0
    stop: int = 0


def lay_out(trees: Sequence[Node], rng: random.Random) -> tuple[list[list[Node]], list[list[Node]]]:
    """Number the rows depth first: the nodes of each level, and of each row those of its path."""
    levels: list[list[Node]] = []
    paths: list[list[Node]] = []

    def visit(node: Node, path: list[Node]) -> None:
        while len(levels) <= len(path):
            levels.append([])
        path = [*path, node]
        levels[len(path) - 1].append(node)
        node.pages = pages_for(node.tokens, rng)
        node.start = len(paths)
        paths.extend([path] * node.leaves)
        for child in node.children:
            visit(child, path)
        node.stop = len(paths)

    for tree in trees:
        visit(tree, [])
    return [[node for node in level if node.stop > node.start] for level in levels], paths


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Sequence[Segment]], scale: float
) -> tuple[Tensor, Tensor]:
    """Full attention of each row over the concatenation of its own segments; fp32."""
    slots = [
        torch.cat([torch.empty(0, dtype=torch.int64)] + [reference.slots_of(*s) for s in row])
        for row in segments
    ]
    parts = [
        reference.attention(q[i : i + 1], k[keys], v[keys], scale) for i, keys in enumerate(slots)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

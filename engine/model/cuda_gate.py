"""What sharing the read of a node costs on a CUDA device, measured with the engine's kernels.

Imports nothing but torch, numpy and our kernels, so that the GPU check can use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.cuda_graphs import replay_seconds
from kernels.attention import decode_attention, merge_states, prefix_attention
from kernels.spans import PAGE_SIZE, Segment, Spans
from kernels.triton_spans import AttentionShape, DeviceSpans

CACHE_BYTES = 128 << 20  # of the keys and values that are gone through: twice a large L2
MAX_LAYERS = 16
SUFFIX = 64  # private tokens of each row

Call = Callable[[], None]
Seconds = Callable[[Sequence[Call]], float]
Table = tuple[tuple[float, ...], ...]


def sharing_seconds(
    shape: AttentionShape,
    device: torch.device,
    rows: Sequence[int],
    tokens: Sequence[int],
    seconds: Seconds = replay_seconds,
    programs: int | None = None,
) -> tuple[Table, Table]:
    """Time both ways as captured steps run them; some seconds in all.

    rows over a node of so many tokens, by all combinations. seconds: of one of several equal calls
    that read other memory each; programs: as of `DeviceSpans`. Returns seconds [rows][tokens] of
    one layer, the node read once for all rows and read by each.
    """
    shared, own = ([[0.0] * len(tokens) for _ in rows] for _ in range(2))
    bench = _Bench(shape, device, programs)
    for (i, count), (j, length) in itertools.product(enumerate(rows), enumerate(tokens)):
        shared[i][j] = seconds(bench.calls(count, length, True))
        own[i][j] = seconds(bench.calls(count, length, False))
    return tuple(map(tuple, shared)), tuple(map(tuple, own))


class _Bench:
    """Makes the calls of one node, its rows and their suffixes."""

    def __init__(self, shape: AttentionShape, device: torch.device, programs: int | None) -> None:
        self._shape, self._device, self._programs = shape, device, programs
        self._scale = shape.head_dim**-0.5

    def calls(self, rows: int, tokens: int, shared: bool) -> list[Call]:
        """A call for each of several layers, whose keys lie in different memory."""
        shape, device = self._shape, self._device
        pages, each = -(-tokens // PAGE_SIZE), SUFFIX // PAGE_SIZE
        node: Segment = range(pages), tokens
        suffixes: list[Segment] = [
            (range(pages + row * each, pages + (row + 1) * each), SUFFIX) for row in range(rows)
        ]
        decode = self._place(
            Spans.build(
                (row, row + 1, [suffix] if shared else [node, suffix], False)
                for row, suffix in enumerate(suffixes)
            )
        )
        groups = self._place(Spans.groups([[(0, rows, *node)]], rows)) if shared else None
        q = torch.ones((rows, shape.heads, shape.head_dim), dtype=shape.dtype, device=device)
        states = (2 if shared else 1, *q.shape[:2])
        out = torch.empty((*states, shape.head_dim), dtype=torch.float32, device=device)
        lse = torch.empty(states, dtype=torch.float32, device=device)
        size = ((pages + rows * each) * PAGE_SIZE, shape.kv_heads, shape.head_dim)
        bytes_each = 2 * size[0] * size[1] * size[2] * shape.dtype.itemsize
        layers = min(MAX_LAYERS, -(-CACHE_BYTES // bytes_each)) if device.type == "cuda" else 1
        return [
            partial(self._attend, q, torch.ones(size, dtype=shape.dtype, device=device),
                    torch.ones(size, dtype=shape.dtype, device=device), decode, groups, out, lse)
            for _ in range(layers)
        ]  # fmt: skip

    def _place(self, spans: Spans) -> DeviceSpans:
        return DeviceSpans.of(spans, self._shape, self._device, self._programs)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decode: DeviceSpans,
        groups: DeviceSpans | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        decode_attention(q, k, v, decode, self._scale, out, lse)
        if groups is not None:
            prefix_attention(q, k, v, groups, self._scale, out, lse)
        merge_states(out, lse, torch.empty_like(q))

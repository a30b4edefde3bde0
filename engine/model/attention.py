"""Hydragen attention of a step: which kernel reads which keys, and the exact merge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, Segment
from engine.memory.page_pool import PAGE_SIZE, pages_for
from engine.memory.prefix_tree import PrefixNode
from kernels.attention import decode_attention, merge_states, prefill_attention, prefix_attention
from kernels.prefix_choice import PrefixKernel
from kernels.spans import UNMASKED, Spans
from kernels.triton_spans import AttentionShape, DeviceSpans

Sharing = Literal["auto", "always", "never"]
SPARE_PAGES = 4  # of a decode row, so that its table is not built again for each new page


class Gate(Protocol):
    """Decides for a node whether its readers share one read of it."""

    def shares(self, num_tokens: int, num_rows: int) -> bool: ...


class FixedGate:
    """Every node is shared, or none."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def shares(self, num_tokens: int, num_rows: int) -> bool:
        return self._answer


class StepAttention:
    """The attention of one step, the same for every layer: built once, called per layer.

    Each row attends to the nodes of its path and, causally, to its own tokens. The gate decides
    for each node: read once for all of its rows, as a state of its own (Hydragen, section 3.1),
    or by each row as a part of its own keys. All states of a row are merged by their log-sum-exp.

    `decode` and `prefill` are the spans of either kind of rows, for state 0; `groups` those of the
    shared nodes, for the states 1 to `levels`. `prefix_kernel` computes those; None: the default.
    """

    def __init__(
        self,
        batch: Batch,
        num_heads: int,
        head_dim: int,
        gate: Gate,
        prefix_kernel: PrefixKernel | None = None,
    ) -> None:
        segments, decode = batch.segments, batch.num_decode
        self._prefix_kernel = prefix_kernel
        self._scale = head_dim**-0.5
        readers = Counter(node for segment in segments for node in segment.path)
        shared = {node for node, count in readers.items() if gate.shares(len(node), count)}
        self.shared_tokens = sum((readers[node] - 1) * len(node) for node in shared)
        self.groups = _groups(batch, shared)
        self.decode = _decode_spans(segments[:decode], shared) if decode else None
        self.prefill = None
        if decode < len(segments):
            self.prefill = Spans.build(
                (
                    row,
                    row + segment.end - segment.start,
                    [
                        *((n.seq.page_ids, len(n)) for n in segment.path if n not in shared),
                        (segment.seq.page_ids, segment.end),
                    ],
                    True,
                )
                for segment, row in zip(segments[decode:], batch.first_rows[decode:], strict=True)
            )
        self.levels = 0 if self.groups is None else int(self.groups.rows[:, 3].max())
        self._states: tuple[Tensor, Tensor] | None = None  # out and lse, where the rows are
        self._on_device: tuple[DeviceSpans | None, ...] | None = None  # decode, prefill, groups
        self._rows = [(segment.seq, segment.path) for segment in segments]
        self._ends = np.array([segment.end for segment in segments])

    def advance(self, batch: Batch) -> bool:
        """Take the next step of the same rows, each one token longer or none; False if it is not.

        Costs a few array operations, whatever the number of rows.
        """
        if self.decode is None or self.prefill is not None:
            return False
        segments, own = batch.segments, self.decode.segments[:, -1]
        if self._rows != [(segment.seq, segment.path) for segment in segments]:
            return False
        ends = np.array([segment.end for segment in segments])
        grown = ends - self._ends
        last = (ends - 1) // PAGE_SIZE
        if batch.num_decode < len(segments) or grown.min() < 0 or grown.max() > 1:
            return False
        if len(own) > 1 and int(last.max()) >= own[1, 0] - own[0, 0]:
            return False
        if int(own[-1, 0] + last[-1]) >= len(self.decode.pages):
            return False
        self._on_device = None
        self.decode.pages[own[:, 0] + last] = batch.slots.numpy() // PAGE_SIZE
        own[:, 1] = ends
        self._ends = ends
        return True

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, result: Tensor) -> None:
        """Attention of one layer.

        q [T, H, d]; k_cache, v_cache [num_slots, KVH, d]; result [T, H, d], written.
        """
        if self._states is None:
            shape = (self.levels + 1, *q.shape[:2])
            self._states = (
                torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device),
                torch.empty(shape, dtype=torch.float32, device=q.device),
            )
        scale, (out, lse) = self._scale, self._states
        decode, prefill, groups = self._spans(q, k_cache)
        if decode is not None:
            decode_attention(q, k_cache, v_cache, decode, scale, out, lse)
        if prefill is not None:
            prefill_attention(q, k_cache, v_cache, prefill, scale, out, lse)
        if groups is not None:
            of_groups = self._prefix_kernel or prefix_attention
            of_groups(q, k_cache, v_cache, groups, scale, out, lse)
        merge_states(out, lse, result)

    def _spans(self, q: Tensor, k_cache: Tensor) -> Sequence[Spans | DeviceSpans | None]:
        """Decode, prefill and groups; on a CUDA device they are brought there once per step."""
        spans = (self.decode, self.prefill, self.groups)
        if not q.is_cuda:
            return spans
        if self._on_device is None:
            shape = AttentionShape(q.shape[1], k_cache.shape[1], q.shape[2], q.dtype)
            self._on_device = tuple(
                None if part is None else DeviceSpans.of(part, shape, q.device) for part in spans
            )
        return self._on_device


def _groups(batch: Batch, shared: set[PrefixNode]) -> Spans | None:
    """The rows of every shared node; a node's state is the number of shared ones to it."""
    if not shared:
        return None
    levels: list[list[tuple[int, int, PrefixNode]]] = []
    for segment, row in zip(batch.segments, batch.first_rows, strict=True):
        stop = row + segment.end - segment.start
        for level, node in enumerate(node for node in segment.path if node in shared):
            if level == len(levels):
                levels.append([])
            runs = levels[level]
            if runs and runs[-1][1] == row and runs[-1][2] is node:
                runs[-1] = (runs[-1][0], stop, node)
            else:
                runs.append((row, stop, node))
    return Spans.groups(
        [[(a, b, node.seq.page_ids, len(node)) for a, b, node in runs] for runs in levels],
        batch.num_tokens,
    )


def _decode_spans(segments: tuple[Segment, ...], shared: set[PrefixNode]) -> Spans:
    """Nodes that each row reads for itself, then its own pages, with room for more of them."""
    rows = np.zeros((len(segments), 4), np.int64)
    rows[:, 0] = np.arange(len(segments))
    rows[:, 1] = rows[:, 0] + 1
    rows[:, 2] = UNMASKED
    own = [[node for node in segment.path if node not in shared] for segment in segments]
    depth = max(len(nodes) for nodes in own)
    width = max(pages_for(segment.end) for segment in segments) + SPARE_PAGES
    places: dict[PrefixNode, int] = {}
    pages: list[int] = []
    for nodes in own:
        for node in nodes:
            if node not in places:
                places[node] = len(pages)
                pages.extend(node.seq.page_ids)
    table = np.zeros((len(segments), depth + 1, 2), np.int64)
    own_pages = np.zeros((len(segments), width), np.int32)
    for row, (segment, nodes) in enumerate(zip(segments, own, strict=True)):
        for i, node in enumerate(nodes):
            table[row, i] = places[node], len(node)
        held = segment.seq.page_ids[: pages_for(segment.end)]
        own_pages[row, : len(held)] = held
        table[row, depth] = len(pages) + row * width, segment.end
    return Spans(rows, table, np.concatenate([np.array(pages, np.int32), own_pages.ravel()]))

"""Hydragen attention of a step: which kernel reads which keys, and the exact merge."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.memory.prefix_tree import PrefixNode
from kernels.attention import (
    PrefillMeta,
    PrefixGroups,
    State,
    decode_attention,
    merge_states,
    prefill_attention,
    prefix_attention,
)

Sharing = Literal["auto", "always", "never"]
MIN_SHARED_ROWS = 2  # a node that fewer rows read is read by the decode kernel instead


class StepAttention:
    """The attention of one step, the same for every layer: built once, called per layer.

    Each row attends to its prefix node and, causally, to its own pages; both parts are exact and
    merged by their log-sum-exp (Hydragen, section 3.1). `sharing` decides who reads the nodes:
    the prefix kernel once for all rows of a node, or the decode kernel once for every row.
    """

    def __init__(self, batch: Batch, num_heads: int, head_dim: int, sharing: Sharing) -> None:
        total, decode = batch.num_tokens, batch.num_decode
        self._num_decode = decode
        self._num_tokens = total
        self._scale = head_dim**-0.5
        segments = batch.segments
        # the nodes
        shared: list[tuple[int, int, list[int], int]] = []
        single: list[tuple[int, PrefixNode]] = []  # decode rows that read their node alone
        self.shared_tokens = 0  # prefix tokens whose read was saved by sharing
        rows = zip(segments, batch.first_rows, strict=True)
        for node, run in itertools.groupby(rows, key=lambda item: item[0].node):
            if node is None:
                continue
            members = list(run)
            first = members[0][1]
            last_segment, last_row = members[-1]
            end = last_row + last_segment.end - last_segment.start
            if _share(sharing, first, end, decode):
                shared.append((first, end, node.seq.page_ids, len(node)))
                self.shared_tokens += (len(members) - 1) * len(node)
            else:
                single.extend((row, node) for row in range(first, min(end, decode)))
                if end > decode:  # prefill rows always share their own read
                    shared.append((max(first, decode), end, node.seq.page_ids, len(node)))
        self._prefix = PrefixGroups.build(shared, total) if shared else None
        # the private pages of decode rows
        self._own = _page_table([(s.seq.page_ids, s.end) for s in segments[:decode]])
        self._node_pages = None
        if single:
            by_row = dict(single)
            self._node_pages = _page_table(
                [
                    (by_row[row].seq.page_ids, len(by_row[row])) if row in by_row else ([], 0)
                    for row in range(decode)
                ]
            )
        # the private pages of prefill rows
        self._prefill = None
        if decode < total:
            first_rows = [row - decode for row in batch.first_rows[decode:]]
            self._prefill = PrefillMeta.build(
                [*first_rows, total - decode],
                [s.seq.page_ids for s in segments[decode:]],
                [s.end for s in segments[decode:]],
            )
        shape = (total, num_heads, head_dim)
        self._suffix_state: State = _state(shape)
        self._prefix_state = _state(shape) if self._prefix is not None else None
        self._node_state = _state((decode, num_heads, head_dim)) if single else None

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, result: Tensor) -> None:
        """Attention of one layer.

        q [T, H, d]; k_cache, v_cache [num_slots, KVH, d]; result [T, H, d], written.
        """
        decode, scale = self._num_decode, self._scale
        out, lse = self._suffix_state
        if self._own is not None:
            table, lengths = self._own
            decode_attention(
                q[:decode], k_cache, v_cache, table, lengths, scale, out[:decode], lse[:decode]
            )
        if self._prefill is not None:
            prefill_attention(
                q[decode:], k_cache, v_cache, self._prefill, scale, out[decode:], lse[decode:]
            )
        states = [self._suffix_state]
        if self._prefix is not None and self._prefix_state is not None:
            prefix_attention(q, k_cache, v_cache, self._prefix, scale, *self._prefix_state)
            states.append(self._prefix_state)
        if self._node_pages is None or self._node_state is None:
            merge_states(states, result)
            return
        table, lengths = self._node_pages
        decode_attention(q[:decode], k_cache, v_cache, table, lengths, scale, *self._node_state)
        head = [(o[:decode], s[:decode]) for o, s in states]
        merge_states([*head, self._node_state], result[:decode])
        if decode < self._num_tokens:
            merge_states([(o[decode:], s[decode:]) for o, s in states], result[decode:])


def _share(sharing: Sharing, first: int, end: int, decode: int) -> bool:
    """Whether the rows [first, end), of which those below `decode` decode, share a node's read."""
    if sharing == "auto":
        return end - first >= MIN_SHARED_ROWS
    return sharing == "always"


def _state(shape: tuple[int, int, int]) -> State:
    return torch.empty(shape, dtype=torch.float32), torch.empty(shape[:2], dtype=torch.float32)


def _page_table(rows: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor] | None:
    """int32 page table [B, max_pages] and lengths [B] of rows (page ids, tokens); None if empty."""
    if not rows:
        return None
    width = max(1, max(len(pages) for pages, _ in rows))
    table = np.zeros((len(rows), width), dtype=np.int32)
    for i, (pages, _) in enumerate(rows):
        table[i, : len(pages)] = pages
    lengths = np.array([length for _, length in rows], dtype=np.int32)
    return torch.from_numpy(table), torch.from_numpy(lengths)

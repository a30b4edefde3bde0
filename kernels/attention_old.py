"""Attention by page table and by sequence, on top of spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import attention
from kernels.spans import Segment, Spans

State = tuple[Tensor, Tensor]  # (out, lse) of one part


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """One level of shared nodes of a step: which rows read which node. Built once per step."""

    num_rows: int
    spans: Spans

    @classmethod
    def build(
        cls, groups: Sequence[tuple[int, int, Sequence[int], int]], num_rows: int
    ) -> PrefixGroups:
        """From (row start, row stop, pages, length in tokens) per group, in ascending row order."""
        return cls(num_rows, Spans.groups([groups], num_rows, first_state=0))


@dataclass(frozen=True, slots=True)
class PrefillMeta:
    """The sequences of a prefill step: rows and private keys of each. Built once per step."""

    num_rows: int
    spans: Spans

    @classmethod
    def build(
        cls, cu_q: Sequence[int], page_lists: Sequence[Sequence[int]], kv_lens: Sequence[int]
    ) -> PrefillMeta:
        """From cumulative row counts [S + 1], and per sequence its pages and its keys in tokens."""
        spans: list[tuple[int, int, list[Segment], bool]] = [
            (start, stop, [(pages, length)], True)
            for start, stop, pages, length in zip(cu_q, cu_q[1:], page_lists, kv_lens, strict=False)
            if stop > start
        ]
        return cls(cu_q[-1], Spans.build(spans))


def prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    groups: PrefixGroups,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Each group's rows against all keys of its node, read once for the whole group."""
    attention.prefix_attention(q, k_cache, v_cache, groups.spans, scale, out[None], lse[None])


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: PrefillMeta,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Causal attention of each sequence's rows over its own pages."""
    attention.prefill_attention(q, k_cache, v_cache, meta.spans, scale, out[None], lse[None])


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One query row per sequence against the first seq_lens[b] tokens of its own pages."""
    table, lengths = page_table.numpy(), seq_lens.numpy().astype(np.int64)
    row = np.arange(len(lengths))
    unmasked = np.full_like(row, 1 << 40)
    spans = Spans(
        np.stack([row, row + 1, unmasked, np.zeros_like(row)], axis=1),
        np.stack([row * table.shape[1], lengths], axis=1)[:, None].copy(),
        np.ascontiguousarray(table).reshape(-1),
    )
    attention.decode_attention(q, k_cache, v_cache, spans, scale, out[None], lse[None])


def merge_states(states: Sequence[State], result: Tensor) -> None:
    """The exact attention over all parts together, from each part's (out, lse)."""
    outs = torch.stack([out for out, _ in states])
    attention.merge_states(outs, torch.stack([lse for _, lse in states]), result)

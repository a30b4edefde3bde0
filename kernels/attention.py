"""Attention parts over the paged cache and their exact merge (Hydragen, arXiv 2402.05099).

Every part returns `out` fp32 `[T, H, d]`, normalised within the part, and `lse` fp32 `[T, H]`, the
natural logarithm of its softmax denominator; an empty part has out = 0 and lse = -inf.
Caches are `[num_slots, num_kv_heads, head_dim]`, slot = page_id * PAGE_SIZE + offset. H is a
multiple of num_kv_heads; query head h reads KV head h // (H / num_kv_heads).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import attention_cpu as cpu
from kernels.attention_tile import BF16_DOT, BF16_WIDENED, FP32, MAX_ROWS, scratch_floats
from kernels.attention_tile import PAGE_SIZE as PAGE_SIZE
from kernels.parallel import num_threads
from kernels.rows_cpu import MERGE, merge_rows
from kernels.vector_ir import HAS_BF16_DOT

BF16_KIND = BF16_DOT if HAS_BF16_DOT else BF16_WIDENED
State = tuple[Tensor, Tensor]  # (out, lse) of one part


_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """One level of shared nodes of a step: which rows read which node. Built once per step.

    A deeper tree is one PrefixGroups (and one state) per level.
    """

    num_rows: int
    spans: NDArray[np.int64]  # [S, 5]: row start, row stop, keys, causal base, first of its pages
    pages: NDArray[np.int32]  # page lists of all spans, one after another

    @classmethod
    def build(
        cls, groups: Sequence[tuple[int, int, Sequence[int], int]], num_rows: int
    ) -> PrefixGroups:
        """From (row start, row stop, pages, length in tokens) per group, in ascending row order.

        pages: any sequence of ints, adjacent or not. ValueError: overlapping or unordered groups,
        rows beyond num_rows, a length that the pages do not hold.
        """
        table = _SpanTable(num_rows)
        for start, stop, pages, length in groups:
            table.add(start, stop, pages, length, cpu.UNMASKED)
        return cls(num_rows, *table.arrays())


@dataclass(frozen=True, slots=True)
class PrefillMeta:
    """The sequences of a prefill step: rows and private keys of each. Built once per step."""

    num_rows: int
    spans: NDArray[np.int64]  # [S, 5], as in PrefixGroups
    pages: NDArray[np.int32]

    @classmethod
    def build(
        cls, cu_q: Sequence[int], page_lists: Sequence[Sequence[int]], kv_lens: Sequence[int]
    ) -> PrefillMeta:
        """From cumulative row counts [S + 1], and per sequence its pages and its keys in tokens.

        kv_lens count the step's own rows, whose K/V are written before. A sequence without rows
        is left out. ValueError: kv_len below the sequence's rows, too few pages, lengths differ.
        """
        if not len(cu_q) - 1 == len(page_lists) == len(kv_lens):
            raise ValueError(
                f"{len(cu_q)} offsets, {len(page_lists)} page lists, {len(kv_lens)} lengths"
            )
        table = _SpanTable(cu_q[-1])
        for start, stop, pages, kv_len in zip(cu_q, cu_q[1:], page_lists, kv_lens, strict=False):
            if kv_len < stop - start:
                raise ValueError(f"{kv_len} keys are fewer than the {stop - start} query rows")
            if stop > start:
                table.add(start, stop, pages, kv_len, kv_len - stop)
        return cls(cu_q[-1], *table.arrays())


class _SpanTable:
    """Collects the spans of a step, checking each."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._row = 0
        self._spans: list[tuple[int, int, int, int, int]] = []
        self._pages: list[int] = []

    def add(self, start: int, stop: int, pages: Sequence[int], length: int, base: int) -> None:
        if not self._row <= start < stop <= self._num_rows:
            raise ValueError(
                f"rows [{start}, {stop}) are not a range within [{self._row}, {self._num_rows})"
            )
        if length < 0 or length > len(pages) * PAGE_SIZE:
            raise ValueError(f"{length} tokens do not fit in {len(pages)} pages of {PAGE_SIZE}")
        self._row = stop
        self._spans.append((start, stop, length, base, len(self._pages)))
        self._pages.extend(pages[: -(-length // PAGE_SIZE)])

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        spans = np.array(self._spans, dtype=np.int64).reshape(-1, 5)
        return spans, np.array(self._pages, dtype=np.int32)


class _Scratch:
    """Working memory of the attention kernel; grows, never shrinks. Used by one thread only."""

    def __init__(self) -> None:
        self._floats: NDArray[np.float32] = np.empty(0, np.float32)
        self._address = 0

    def get(self, threads: int, dim: int) -> int:
        size = threads * scratch_floats(dim)
        if self._floats.size < size + 16:
            self._floats = np.zeros(size + 16, np.float32)
            self._address = -(-self._floats.ctypes.data // 64) * 64  # a cache line's start
        return self._address


_scratch = _Scratch()


def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: PrefixGroups | PrefillMeta | tuple[Tensor, Tensor],
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if dim % 16 or heads % kv_heads or heads > MAX_ROWS * kv_heads:
        raise ValueError(f"head_dim {dim} or {heads} heads over {kv_heads} is not supported")
    if not (out.is_contiguous() and lse.is_contiguous() and q.stride(1) == dim):
        raise ValueError("out and lse, and each row of q, must be contiguous")
    if q.dtype == torch.float32:
        kind, width = FP32, 4
    elif q.dtype == torch.bfloat16:
        kind, width = BF16_KIND, 2
    else:
        raise ValueError(f"{q.dtype} is not supported: fp32 or bf16")
    threads = num_threads()
    common = (
        kind, q.data_ptr(), q.stride(0) * width, k_cache.data_ptr(), v_cache.data_ptr(),
        heads, kv_heads, dim, scale * _LOG2E,
    )  # fmt: skip
    results = (rows, out.data_ptr(), lse.data_ptr(), _scratch.get(threads, dim), threads)
    part = cpu.PART.address
    if isinstance(table, tuple):
        page_table, seq_lens = table
        pages = page_table.data_ptr()
        cpu.run_rows(*common, seq_lens.data_ptr(), pages, page_table.stride(0), *results, part)
    elif table.num_rows != rows:
        raise ValueError(f"q has {rows} rows, its metadata {table.num_rows}")
    else:
        cpu.run_spans(*common, table.spans, table.pages.ctypes.data, *results, part)


def prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    groups: PrefixGroups,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Each group's rows against all keys of its node, read once for the whole group; not causal.

    q [T, H, d]; out fp32 [T, H, d], written; lse fp32 [T, H], written.
    Rows in no group, or whose node is empty, get out = 0 and lse = -inf.
    """
    _run(q, k_cache, v_cache, groups, scale, out, lse)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: PrefillMeta,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Causal attention of each sequence's rows over its own pages.

    Row i of a sequence with q_len rows and kv_len keys sees keys j <= kv_len - q_len + i.
    q [T, H, d]; out fp32 [T, H, d], written; lse fp32 [T, H], written.
    """
    _run(q, k_cache, v_cache, meta, scale, out, lse)


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
    """One query row per sequence against the first seq_lens[b] tokens of its own pages.

    q [B, H, d]; page_table int32 [B, max_pages] (entries past a sequence's length are not read);
    seq_lens int32 [B], 0 allowed (out = 0, lse = -inf); out fp32 [B, H, d] and lse fp32 [B, H],
    written.
    """
    if page_table.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ValueError(f"{page_table.dtype} page table, {seq_lens.dtype} lengths: not int32")
    _run(q, k_cache, v_cache, (page_table, seq_lens), scale, out, lse)


def merge_states(states: Sequence[State], result: Tensor) -> None:
    """The exact attention over all parts together, from each part's (out, lse).

    out fp32 [T, H, d], lse fp32 [T, H] per part, at least one; result [T, H, d] (or a view of
    [T, H * d]) in the model's dtype, written. All parts empty: 0.
    """
    out, lse = states[0]
    if len(states) == 1:
        result.copy_(out.view(result.shape))
        return
    rows, dim, threads = lse.numel(), out.shape[-1], num_threads()
    part = MERGE.address
    for other, other_lse in states[1:-1]:
        merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
        merge_rows(
            False,
            out.data_ptr(),
            lse.data_ptr(),
            other.data_ptr(),
            other_lse.data_ptr(),
            merged.data_ptr(),
            merged_lse.data_ptr(),
            rows,
            dim,
            threads,
            part,
        )
        out, lse = merged, merged_lse
    other, other_lse = states[-1]
    merge_rows(
        result.dtype == torch.bfloat16,
        out.data_ptr(),
        lse.data_ptr(),
        other.data_ptr(),
        other_lse.data_ptr(),
        result.data_ptr(),
        0,
        rows,
        dim,
        threads,
        part,
    )

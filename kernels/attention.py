"""Attention parts over the paged cache and their exact merge (Hydragen, arXiv 2402.05099).

Every part returns `out` fp32, normalised within the part, and `lse` fp32, the natural logarithm of
its softmax denominator; an empty part has out = 0 and lse = -inf. Both hold P states of the step's
T rows, out `[P, T, H, d]` and lse `[P, T, H]`: a call writes the rows and states that its spans
name, and nothing else. Caches are `[num_slots, num_kv_heads, head_dim]`, contiguous,
slot = page_id * PAGE_SIZE + offset. H is a multiple of num_kv_heads; query head h reads KV head
h // (H / num_kv_heads).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.compiled import attention_kernels, row_kernels
from kernels.spans import Spans
from kernels.triton_spans import DeviceSpans

_LOG2E = math.log2(math.e)


class _Scratch:
    """Working memory of the attention kernel; grows, never shrinks. Used by one thread only."""

    def __init__(self) -> None:
        self._floats: NDArray[np.float32] = np.empty(0, np.float32)
        self._address = 0

    def get(self, size: int) -> int:
        """Address of that many floats."""
        if self._floats.size < size + 16:
            self._floats = np.zeros(size + 16, np.float32)
            self._address = -(-self._floats.ctypes.data // 64) * 64  # a cache line's start
        return self._address


_scratch = _Scratch()


def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spans: Spans | DeviceSpans,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    if q.is_cuda:
        from kernels import triton_attention  # not where there is no Triton

        triton_attention.span_attention(q, k_cache, v_cache, spans, scale, out, lse)
        return
    attention_block_cpu, attention_cpu, attention_tile, parallel = attention_kernels()
    spans = spans.host if isinstance(spans, DeviceSpans) else spans
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if dim % 16 or heads % kv_heads or heads > attention_tile.MAX_ROWS * kv_heads:
        raise ValueError(f"head_dim {dim} or {heads} heads over {kv_heads} is not supported")
    if out.shape[1:] != q.shape or lse.shape != out.shape[:3] or k_cache.shape[2] != dim:
        raise ValueError(
            f"q {list(q.shape)}, out {list(out.shape)}, lse {list(lse.shape)} and keys "
            f"{list(k_cache.shape)} do not fit"
        )
    if not (out.is_contiguous() and lse.is_contiguous() and q.stride(1) == dim):
        raise ValueError("out and lse, and each row of q, must be contiguous")
    if q.dtype == torch.float32:
        kind, width = attention_tile.FP32, 4
    elif q.dtype == torch.bfloat16:
        kind, width = attention_tile.BF16, 2
    else:
        raise ValueError(f"{q.dtype} is not supported: fp32 or bf16")
    if not q.dtype == k_cache.dtype == v_cache.dtype or v_cache.shape != k_cache.shape:
        raise ValueError(f"{q.dtype} queries, {k_cache.dtype} keys, {v_cache.dtype} values")
    threads = parallel.num_threads()
    outside = attention_cpu.run_spans(
        kind,
        q.data_ptr(),
        q.stride(0) * width,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        heads,
        kv_heads,
        dim,
        scale * _LOG2E,
        spans.rows,
        spans.segments,
        spans.pages.ctypes.data,
        rows,
        out.shape[0],
        out.data_ptr(),
        lse.data_ptr(),
        _scratch.get(threads * attention_block_cpu.scratch_floats(dim)),
        threads,
        attention_cpu.PART.address,
    )
    if outside >= 0:
        start, stop, _, state = spans.rows[outside].tolist()
        raise ValueError(
            f"rows [{start}, {stop}) of state {state} are not within {rows} rows and "
            f"{out.shape[0]} states"
        )


def prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spans: Spans | DeviceSpans,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Groups of rows against shared nodes, each read once for its whole group; not causal.

    q [T, H, d], row stride free; spans of any number of groups and tree levels, `DeviceSpans` on
    CUDA lest each call copies them there; out, lse written where spans are. ValueError: layouts
    and dtypes other than fp32 and bf16, spans outside.
    """
    _run(q, k_cache, v_cache, spans, scale, out, lse)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spans: Spans | DeviceSpans,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One query row a span against all its segments: unshared nodes, then its own pages.

    Tensors and errors as of `prefix_attention`. A span's keys are one sequence to the softmax.
    """
    _run(q, k_cache, v_cache, spans, scale, out, lse)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spans: Spans | DeviceSpans,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Causal spans over their segments, whose last keys are the rows' own, written before.

    Tensors and errors as of `prefix_attention`.
    """
    _run(q, k_cache, v_cache, spans, scale, out, lse)


def merge_states(out: Tensor, lse: Tensor, result: Tensor) -> None:
    """The exact attention over all P parts together, in one pass over them.

    out fp32 [P, T, H, d], lse fp32 [P, T, H], any P >= 1; out is not read where lse is -inf. result
    [T, H, d] or [T, H * d], fp32 or bf16, contiguous, written; all parts empty: 0. ValueError:
    other shapes, dtypes or strides.
    """
    if out.is_cuda:
        from kernels import triton_merge

        triton_merge.merge_states(out, lse, result)
        return
    parallel, rows_cpu = row_kernels()
    states, rows, heads, dim = out.shape
    if lse.shape != out.shape[:3] or result.numel() != rows * heads * dim or dim % 16 or not states:
        raise ValueError(
            f"out {list(out.shape)}, lse {list(lse.shape)}, result {list(result.shape)} do not fit"
        )
    if not (out.is_contiguous() and lse.is_contiguous() and result.is_contiguous()):
        raise ValueError("out, lse and result must be contiguous")
    if out.dtype != torch.float32 or result.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{out.dtype} states or a {result.dtype} result is not supported")
    rows_cpu.merge_rows(
        result.dtype == torch.bfloat16,
        out.data_ptr(),
        lse.data_ptr(),
        states,
        result.data_ptr(),
        rows * heads,
        dim,
        parallel.num_threads(),
        rows_cpu.MERGE.address,
    )

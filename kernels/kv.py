"""Writers of the paged K/V cache: rotary embedding and scatter, restoration, byte copies.

Caches are `[num_slots, num_kv_heads, head_dim]`, contiguous; slot = page_id * 64 + offset.
RoPE is Llama's half-split form (transformers' rotate_half), in fp32 with one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.compiled import row_kernels
from kernels.elementwise import qk_norm, rms_norm


def rope_table(inv_freq: Tensor, max_positions: int, attention_scaling: float = 1.0) -> Tensor:
    """cos and sin of every position: fp32 [max_positions, head_dim], cos in the first half.

    inv_freq fp32 [head_dim / 2], radians per token, as transformers computes it.
    """
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq.float()[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_scaling


def write_kv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """Rotate q in place, rotate k, and store k and v at their slots.

    q [T, H, d], written (None: keys and values only); k, v [T, KVH, d], not written; all may be
    views of one fused row: only the last two dimensions must be contiguous. cos_sin fp32
    [max_positions, d] of `rope_table`; positions, slots int64 [T]; k_cache, v_cache written.
    """
    if k.is_cuda:
        from kernels import triton_kv

        triton_kv.write_kv(q, k, v, cos_sin, positions, slots, k_cache, v_cache)
        return
    parallel, rows_cpu = row_kernels()
    rows, kv_heads, dim = k.shape
    if dim % 16 or k.stride(1) != dim or v.stride(1) != dim:
        raise ValueError(f"head_dim {dim} is no multiple of 16, or heads are not contiguous")
    width = k.element_size()
    if q is None:
        query, query_row, heads = 0, 0, 0
    else:
        query, query_row, heads = q.data_ptr(), q.stride(0) * width, q.shape[1]
    rows_cpu.write_rows(
        k.dtype == torch.bfloat16,
        query,
        query_row,
        heads,
        k.data_ptr(),
        k.stride(0) * width,
        v.data_ptr(),
        v.stride(0) * width,
        kv_heads,
        dim,
        cos_sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        rows,
        parallel.num_threads(),
        rows_cpu.WRITE.address,
    )


def restore_kv(
    hidden: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    kv_projection: Callable[[Tensor], Tensor],
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_norm_weight: Tensor | None = None,
) -> None:
    """Rebuild one layer's K and V from its hidden states (HCache, section 4.1) at their slots.

    hidden [n, D], the layer's input before its norm (None: the family has none there), in the
    model's dtype; kv_projection: K's rows, then V's ([2 * KVH * d, D]); k_norm_weight as
    `qk_norm` takes it; positions, slots int64 [n]; k_cache, v_cache written.
    Same kernels and rounding as the forward pass: equal to it but for the GEMM's shape.
    """
    normed = hidden if norm_weight is None else rms_norm(hidden, norm_weight, eps)
    projected = kv_projection(normed)
    heads, dim = k_cache.shape[1:]
    k, v = projected.view(-1, 2, heads, dim).unbind(1)
    if k_norm_weight is not None:
        k = qk_norm(k, k_norm_weight, eps)
    write_kv(None, k, v, cos_sin, positions, slots, k_cache, v_cache)


def copy_kv(rows: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Store saved rows at their slots, bit for bit.

    rows [n, 2 * KVH * d] (a token's K, then its V) in the cache's dtype, row stride free;
    slots int64 [n]; k_cache, v_cache written.
    """
    _copy(True, rows, slots, k_cache, v_cache)


def gather_kv(slots: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor) -> None:
    """The inverse of `copy_kv`: slots int64 [n]; rows [n, 2 * KVH * d], written, bit for bit."""
    _copy(False, rows, slots, k_cache, v_cache)


def stage_rows(source: Tensor, rows: Tensor, targets: Tensor, staging: Tensor, step: int) -> None:
    """Copy rows of some layers' hidden states to their places in staging buffers; CPU only.

    source [L, n, D]; rows int64 [m], of each layer; targets int64 [m], where layer 0's go in
    staging [R, D], written; those of layer l go `step` rows further for each layer.
    """
    layers, _, width = source.shape
    if staging.shape[-1] != width or source.dtype != staging.dtype or source.stride(1) != width:
        raise ValueError(f"rows of {width} {source.dtype} do not fit {list(staging.shape)}")
    parallel, rows_cpu = row_kernels()
    size = width * source.element_size()
    rows_cpu.stage_rows(
        source.data_ptr(),
        source.stride(0) * source.element_size(),
        layers,
        rows.data_ptr(),
        targets.data_ptr(),
        len(rows),
        staging.data_ptr(),
        step * size,
        size,
        parallel.num_threads(),
        rows_cpu.STAGE.address,
    )


def _copy(to_cache: bool, rows: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    count, width = rows.shape
    size = k_cache[0].numel()
    if width != 2 * size or rows.dtype != k_cache.dtype or rows.stride(1) != 1:
        raise ValueError(f"rows {list(rows.shape)} {rows.dtype} do not fit {2 * size} a slot")
    if rows.is_cuda:
        from kernels import triton_kv

        triton_kv.copy_rows(to_cache, rows, slots, k_cache, v_cache)
        return
    from kernels import rows_cpu

    item = rows.element_size()
    rows_cpu.copy_rows(
        to_cache,
        rows.data_ptr(),
        rows.stride(0) * item,
        slots.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        size * item,
        count,
    )

"""Writers of the paged K/V cache on CUDA: rotary embedding and scatter in one pass, row copies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COPY_BLOCK = 1024  # elements of a row that one program copies


@triton.jit
def write_kernel(
    q, k, v, cos_sin, positions, slots, k_cache, v_cache, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of q heads, then blocks of KV heads). HALF: d / 2, a power of two."""
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    o_h = tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, HALF)
    m_d = o_d < DIM // 2
    p_angle = cos_sin + tl.load(positions + row) * DIM + o_d
    cos = tl.load(p_angle, mask=m_d, other=0.0)[None, :]
    sin = tl.load(p_angle + DIM // 2, mask=m_d, other=0.0)[None, :]
    if block < Q_BLOCKS:
        head = block * BLOCK_H + o_h
        mask = (head < HEADS)[:, None] & m_d[None, :]
        p_low = q + row * q_stride + head[:, None] * DIM + o_d[None, :]
        low = tl.load(p_low, mask=mask, other=0.0)
        high = tl.load(p_low + DIM // 2, mask=mask, other=0.0)
        new_low = low.to(tl.float32) * cos - high.to(tl.float32) * sin
        new_high = high.to(tl.float32) * cos + low.to(tl.float32) * sin
        tl.store(p_low, new_low.to(low.dtype), mask=mask)
        tl.store(p_low + DIM // 2, new_high.to(low.dtype), mask=mask)
    else:
        head = (block - Q_BLOCKS) * BLOCK_H + o_h
        mask = (head < KV_HEADS)[:, None] & m_d[None, :]
        o_head = head[:, None] * DIM + o_d[None, :]
        p_low = k + row * k_stride + o_head
        p_value = v + row * v_stride + o_head
        low = tl.load(p_low, mask=mask, other=0.0)
        high = tl.load(p_low + DIM // 2, mask=mask, other=0.0)
        value_low = tl.load(p_value, mask=mask)
        value_high = tl.load(p_value + DIM // 2, mask=mask)
        new_low = low.to(tl.float32) * cos - high.to(tl.float32) * sin
        new_high = high.to(tl.float32) * cos + low.to(tl.float32) * sin
        o_slot = tl.load(slots + row) * (KV_HEADS * DIM) + o_head
        tl.store(k_cache + o_slot, new_low.to(low.dtype), mask=mask)
        tl.store(k_cache + o_slot + DIM // 2, new_high.to(low.dtype), mask=mask)
        tl.store(v_cache + o_slot, value_low, mask=mask)
        tl.store(v_cache + o_slot + DIM // 2, value_high, mask=mask)


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
    """Rotate q in place, rotate k, and store k and v at their slots, as `kernels.kv.write_kv`."""
    rows, kv_heads, dim = k.shape
    if not k.shape[1:] == v.shape[1:] == k_cache.shape[1:] == v_cache.shape[1:]:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} do not fit {list(k_cache.shape)}"
        )
    if not positions.dtype == slots.dtype == torch.int64:
        raise ValueError(f"{positions.dtype} positions, {slots.dtype} slots: not int64")
    if k.stride(1) != dim or v.stride(1) != dim or (q is not None and q.stride(1) != dim):
        raise ValueError("the heads of q, k and v must be contiguous")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous")
    heads = 0 if q is None else q.shape[1]
    query = k if q is None else q
    block = 8
    if rows:
        write_kernel[(rows, triton.cdiv(heads, block) + triton.cdiv(kv_heads, block))](
            query, k, v, cos_sin, positions, slots, k_cache, v_cache,
            query.stride(0), k.stride(0), v.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_H=block,
            HALF=triton.next_power_of_2(dim // 2), num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows_stride"])
def copy_kernel(
    rows, slots, k_cache, v_cache, rows_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TO_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of a token's K). SIZE: elements of a token's K."""
    row = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_x < SIZE
    p_k = k_cache + tl.load(slots + row) * SIZE + o_x
    p_v = v_cache + tl.load(slots + row) * SIZE + o_x
    p_row = rows + row * rows_stride + o_x
    if TO_CACHE:
        tl.store(p_k, tl.load(p_row, mask=mask), mask=mask)
        tl.store(p_v, tl.load(p_row + SIZE, mask=mask), mask=mask)
    else:
        tl.store(p_row, tl.load(p_k, mask=mask), mask=mask)
        tl.store(p_row + SIZE, tl.load(p_v, mask=mask), mask=mask)


def copy_rows(
    to_cache: bool, rows: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    """Rows [n, 2 * KVH * d] to (or from) their slots, bit for bit; int64 slots [n]."""
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous")
    size = k_cache.shape[1] * k_cache.shape[2]
    # As integers: no bit pattern of a float is changed on its way.
    integer = torch.int16 if rows.element_size() == 2 else torch.int32
    if len(slots):
        copy_kernel[(len(slots), triton.cdiv(size, _COPY_BLOCK))](
            rows.view(integer), slots, k_cache.view(integer), v_cache.view(integer),
            rows.stride(0), SIZE=size, BLOCK=_COPY_BLOCK, TO_CACHE=to_cache,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip

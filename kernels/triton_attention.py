"""Attention of spans over the paged cache on CUDA: one kernel for prefix, decode and prefill.

A program has one item (see `triton_spans`) and one KV head. A tile of keys is one page. Maxima and
exponents are in units of log2 (the scale times log2 e is one factor); the LSE leaves as a natural
logarithm.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.spans import PAGE_SIZE, Spans
from kernels.triton_merge import join_parts
from kernels.triton_spans import ITEM_FIELDS, AttentionShape, DeviceSpans

_LOG2E = math.log2(math.e)
_LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _tile(
    b_q, b_acc, b_max, b_sum, p_k, p_v, o_page, o_tile, o_n, m_d, limit, tokens, scale_log2,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One page of keys into a block's running (acc, max, sum). limit [M]: last key a row sees."""
    if MASKED:
        o_key = o_tile + o_n
        b_k = tl.load(p_k + o_page, mask=m_d & (o_key < tokens)[:, None], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s = tl.where(o_key[None, :] <= limit[:, None], b_s, float("-inf"))
        b_top = tl.maximum(b_max, tl.max(b_s, axis=1) * scale_log2)
        b_anchor = tl.where(b_top == float("-inf"), 0.0, b_top)  # rows that have seen no key yet
        b_v = tl.load(p_v + o_page, mask=m_d & (o_key < tokens)[:, None], other=0.0)
    else:
        b_k = tl.load(p_k + o_page, mask=m_d, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_top = tl.maximum(b_max, tl.max(b_s, axis=1) * scale_log2)
        b_anchor = b_top
        b_v = tl.load(p_v + o_page, mask=m_d, other=0.0)
    b_p = tl.exp2(b_s * scale_log2 - b_anchor[:, None])  # a multiply-add each
    b_keep = tl.exp2(b_max - b_anchor)
    b_sum = b_sum * b_keep + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_keep[:, None]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_top, b_sum


@triton.jit(do_not_specialize=["depth"])
def attention_kernel(
    q, k, v, out, lse, part_out, part_lse, items, segments, pages, scale_log2, depth,
    q_stride, out_state_stride, out_stride, lse_state_stride, lse_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr,
    ALWAYS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (items x KV heads). ALWAYS_MASK: one loop over all tiles, for blocks of few rows.

    The heads of an item follow one another: so they read whole pages together, and the longest
    items of all heads begin first.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    p_item = items + tl.program_id(0) // KV_HEADS * FIELDS
    kv_head = tl.program_id(0) % KV_HEADS
    first = tl.load(p_item)
    stop = tl.load(p_item + 1)
    if first >= stop:
        return
    base = tl.load(p_item + 2)
    state = tl.load(p_item + 3).to(tl.int64)
    span = tl.load(p_item + 4)
    first_tile = tl.load(p_item + 5)
    tile_stop = tl.load(p_item + 6)
    part = tl.load(p_item + 7)

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, PAGE)
    row = first + o_m // GROUP
    head = kv_head * GROUP + o_m % GROUP
    m_m = (row < stop) & (o_m < BLOCK_M // GROUP * GROUP)
    m_out = m_m[:, None] & (o_d < DIM)[None, :]
    m_d = (o_d < DIM)[None, :]
    p_q = q + row.to(tl.int64)[:, None] * q_stride + head[:, None] * DIM + o_d[None, :]
    b_q = tl.load(p_q, mask=m_out, other=0.0)
    o_kv = o_n[:, None] * (KV_HEADS * DIM) + kv_head * DIM + o_d[None, :]
    p_k = k + o_kv
    p_v = v + o_kv

    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    keys_before = 0
    tiles_before = 0
    for index in range(depth):
        p_segment = segments + (span * depth + index) * 2
        p_pages = pages + tl.load(p_segment)
        tokens = tl.load(p_segment + 1)
        tiles = (tokens + PAGE - 1) // PAGE
        low = tl.maximum(first_tile - tiles_before, 0)
        high = tl.minimum(tile_stop - tiles_before, tiles)
        limit = tl.minimum(base + row - keys_before, tokens - 1)
        # A page id is read one tile ahead: were it read with its tile, the loads of K and V would
        # wait for it, and Triton would keep fewer of them in flight.
        page = tl.load(p_pages + low, mask=low < high, other=0)
        full = low
        if not ALWAYS_MASK:
            # tiles that every row of the block sees in full
            common = tl.minimum(base + first + 1 - keys_before, tokens)
            full = tl.maximum(low, tl.minimum(high, tl.maximum(common, 0) // PAGE))
            for tile in range(low, full):
                o_page = page.to(tl.int64) * (PAGE * KV_HEADS * DIM)
                page = tl.load(p_pages + tile + 1, mask=tile + 1 < tiles, other=0)
                b_acc, b_max, b_sum = _tile(
                    b_q, b_acc, b_max, b_sum, p_k, p_v, o_page, tile * PAGE, o_n, m_d, limit,
                    tokens, scale_log2, False, PRECISION,
                )  # fmt: skip
        for tile in range(full, high):
            o_page = page.to(tl.int64) * (PAGE * KV_HEADS * DIM)
            page = tl.load(p_pages + tile + 1, mask=tile + 1 < tiles, other=0)
            b_acc, b_max, b_sum = _tile(
                b_q, b_acc, b_max, b_sum, p_k, p_v, o_page, tile * PAGE, o_n, m_d, limit,
                tokens, scale_log2, True, PRECISION,
            )  # fmt: skip
        keys_before += tokens
        tiles_before += tiles

    b_total = tl.where(b_sum > 0, b_sum, 1.0)
    b_out = b_acc / b_total[:, None]
    b_lse = (b_max + tl.log2(b_total)) * _LN2
    if part < 0:
        row64 = row.to(tl.int64)
        p_out = out + state * out_state_stride + row64 * out_stride + head * DIM
        p_lse = lse + state * lse_state_stride + row64 * lse_stride + head
    else:
        at = (part + row - first).to(tl.int64) * HEADS + head
        p_out = part_out + at * DIM
        p_lse = part_lse + at
    tl.store(p_out[:, None] + o_d[None, :], b_out, mask=m_out)
    tl.store(p_lse, b_lse, mask=m_m)


def launch_options(block_rows: int, block_dim: int, itemsize: int) -> tuple[int, int]:
    """(num_warps, num_stages) whose tiles fit in a multiprocessor's shared memory."""
    warps = 8 if block_rows >= 128 or block_dim >= 256 else 4
    stage = 2 * PAGE_SIZE * block_dim * itemsize  # bytes of K and V
    if stage > 64 << 10:
        return warps, 1  # fp32 of 256 dimensions
    if stage <= 16 << 10:
        return warps, 4
    return warps, 3 if block_rows <= 32 or stage <= 32 << 10 else 2


def span_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spans: Spans | DeviceSpans,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Rows of each span against its segments' keys, one after another; row r sees j <= base + r.

    q [T, H, d], row stride free; k_cache, v_cache [num_slots, KVH, d] contiguous; d a multiple of
    16 up to 256; out [P, T, H, d] and lse [P, T, H] fp32, written where spans are (lse in natural
    log; a row without keys: 0 and -inf). spans: `DeviceSpans` made once for all layers of a step,
    or `Spans`, which are copied to the device at every call. ValueError: what the kernel cannot do.
    """
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    if heads % kv_heads or dim % 16 or dim > 256:
        raise ValueError(f"head_dim {dim} or {heads} heads over {kv_heads} is not supported")
    if not scale > 0:
        raise ValueError(f"scale {scale} is not above 0")
    if out.shape[1:] != q.shape or lse.shape != out.shape[:3] or k_cache.shape[2] != dim:
        raise ValueError(
            f"q {list(q.shape)}, out {list(out.shape)}, lse {list(lse.shape)} and keys "
            f"{list(k_cache.shape)} do not fit"
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype or v_cache.shape != k_cache.shape:
        raise ValueError(f"{q.dtype} queries, {k_cache.dtype} keys, {v_cache.dtype} values")
    if q.stride(1) != dim or out.stride(2) != dim or lse.stride(2) != 1:
        raise ValueError("the heads of q, out and lse must be contiguous")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous")
    shape = AttentionShape(heads, kv_heads, dim, q.dtype)
    if isinstance(spans, Spans):
        spans = DeviceSpans.of(spans, shape, q.device)
    if spans.shape != shape:
        raise ValueError(f"spans for {spans.shape}, tensors of {shape}")
    room = q.shape[0], out.shape[0], k_cache.shape[0] // PAGE_SIZE
    named = spans.row_stop, spans.state_stop, spans.page_stop
    if any(stop > most for stop, most in zip(named, room, strict=True)):
        raise ValueError(f"spans up to (row, state, page) {named} in tensors that hold {room}")
    block_dim = triton.next_power_of_2(dim)
    warps, stages = launch_options(spans.block_rows, block_dim, q.element_size())
    strides = out.stride(0), out.stride(1), lse.stride(0), lse.stride(1)
    if spans.items.shape[0]:
        attention_kernel[(spans.items.shape[0] * kv_heads,)](
            q, k_cache, v_cache, out, lse, spans.part_out, spans.part_lse,
            spans.items, spans.segments, spans.pages, scale * _LOG2E, spans.depth,
            q.stride(0), *strides,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
            BLOCK_M=spans.block_rows, BLOCK_D=block_dim, PAGE=PAGE_SIZE, FIELDS=ITEM_FIELDS,
            ALWAYS_MASK=spans.block_rows <= 32,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
            num_warps=warps, num_stages=stages, enable_fp_fusion=True,
        )  # fmt: skip
    join_parts(spans, out, lse)


# One kernel does all three: a span's base is its mask, and the items say how the work is cut.
prefix_attention = decode_attention = prefill_attention = span_attention

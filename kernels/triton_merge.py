"""Merging of attention states on CUDA: the parts of split blocks, and the states of a step.

sum_p exp(lse_p - m) out_p / sum_p exp(lse_p - m) with m = max_p lse_p (Hydragen, section 3.1). A
part with lse = -inf is not read: its out may hold anything.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_spans import JOIN_FIELDS, DeviceSpans

_JOIN_PARTS = 16  # parts that a join reads at a time


@triton.jit
def join_kernel(
    part_out, part_lse, out, lse, joins,
    out_state_stride, out_stride, lse_state_stride, lse_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Grid (joins, heads): merge the parts of one row and head, exactly."""
    p_join = joins + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    count = tl.load(p_join + 4)
    if count == 0:
        return
    row = tl.load(p_join).to(tl.int64)
    state = tl.load(p_join + 1).to(tl.int64)
    first = tl.load(p_join + 2)
    step = tl.load(p_join + 3)
    o_p = tl.arange(0, BLOCK_P)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM
    b_acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, count, BLOCK_P):
        at = (first + (start + o_p) * step).to(tl.int64) * HEADS + head
        b_lse = tl.load(part_lse + at, mask=start + o_p < count, other=float("-inf"))
        used = b_lse > float("-inf")
        p_part = part_out + at[:, None] * DIM + o_d[None, :]
        b_part = tl.load(p_part, mask=used[:, None] & m_d[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(b_lse, axis=0))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        b_weight = tl.exp(b_lse - anchor)
        keep = tl.exp(top - anchor)
        total = total * keep + tl.sum(b_weight, axis=0)
        b_acc = b_acc * keep + tl.sum(b_part * b_weight[:, None], axis=0)
        top = new_top
    total = tl.where(total > 0, total, 1.0)
    p_out = out + state * out_state_stride + row * out_stride + head * DIM
    tl.store(p_out + o_d, b_acc / total, mask=m_d)
    tl.store(lse + state * lse_state_stride + row * lse_stride + head, top + tl.log(total))


def join_parts(spans: DeviceSpans, out: Tensor, lse: Tensor) -> None:
    """Merge the parts of split blocks into out [P, T, H, d] and lse [P, T, H], fp32, written."""
    if not spans.joins.shape[0]:
        return
    heads, dim = spans.shape.heads, spans.shape.head_dim
    join_kernel[(spans.joins.shape[0], heads)](
        spans.part_out, spans.part_lse, out, lse, spans.joins,
        out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        HEADS=heads, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_P=_JOIN_PARTS,
        FIELDS=JOIN_FIELDS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    out, lse, result, rows, out_state_stride, out_stride, lse_state_stride, lse_stride,
    result_stride, STATES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows x heads). rows: T * H."""
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < rows
    row = (o_r // HEADS).to(tl.int64)
    head = o_r % HEADS
    p_lse = lse + row * lse_stride + head
    p_out = out + (row * out_stride + head * DIM)[:, None] + o_d[None, :]
    m_d = (o_d < DIM)[None, :]
    lse_step = tl.cast(lse_state_stride, tl.int64)
    out_step = tl.cast(out_state_stride, tl.int64)
    b_top = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    for state in tl.static_range(STATES):
        b_lse = tl.load(p_lse + state * lse_step, mask=m_r, other=float("-inf"))
        b_top = tl.maximum(b_top, b_lse)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_total = tl.zeros([BLOCK_R], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for state in tl.static_range(STATES):
        b_lse = tl.load(p_lse + state * lse_step, mask=m_r, other=float("-inf"))
        m_out = (b_lse > float("-inf"))[:, None] & m_d
        b_out = tl.load(p_out + state * out_step, mask=m_out, other=0.0)
        b_weight = tl.exp(b_lse - b_top)
        b_total += b_weight
        b_acc += b_out * b_weight[:, None]
    b_acc = b_acc / tl.where(b_total > 0, b_total, 1.0)[:, None]
    p_result = result + (row * result_stride + head * DIM)[:, None] + o_d[None, :]
    tl.store(p_result, b_acc.to(result.dtype.element_ty), mask=m_r[:, None] & m_d)


def merge_states(out: Tensor, lse: Tensor, result: Tensor) -> None:
    """The exact attention over all states together, in one pass.

    out [P, T, H, d] and lse [P, T, H] fp32, states and rows at any stride; result [T, H, d] or
    [T, H * d] in the model's dtype, written. No state with keys: 0. ValueError: other shapes.
    """
    states, rows, heads, dim = out.shape
    if lse.shape != out.shape[:3] or result.numel() != rows * heads * dim:
        raise ValueError(
            f"out {list(out.shape)}, lse {list(lse.shape)}, result {list(result.shape)} do not fit"
        )
    result = result.view(rows, heads, dim)
    if out.stride(2) != dim or lse.stride(2) != 1 or result.stride(1) != dim:
        raise ValueError("the heads of out, lse and result must be contiguous")
    block_dim = triton.next_power_of_2(dim)
    block_rows = 2048 // block_dim
    merge_kernel[(triton.cdiv(rows * heads, block_rows),)](
        out, lse, result, rows * heads, out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        result.stride(0), STATES=states, HEADS=heads, DIM=dim, BLOCK_R=block_rows,
        BLOCK_D=block_dim, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip

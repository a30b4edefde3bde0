"""Norms and activation on CUDA: arithmetic in fp32, rounded as transformers rounds."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_SILU_BLOCK = 1024


@triton.jit
def norm_kernel(
    x, residual, weight, out, eps, outer_stride, INNER: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Grid (rows). Row r of x: outer row r // INNER, r % INNER pieces of SIZE into it."""
    row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, BLOCK)
    mask = o_x < SIZE
    b_x = tl.load(x + row // INNER * outer_stride + row % INNER * SIZE + o_x, mask=mask, other=0.0)
    if ADDS:
        p_residual = residual + row * SIZE + o_x
        b_old = tl.load(p_residual, mask=mask, other=0.0)
        b_x = (b_old.to(tl.float32) + b_x.to(tl.float32)).to(b_x.dtype)
        tl.store(p_residual, b_x, mask=mask)
    b_wide = b_x.to(tl.float32)
    ratio = tl.rsqrt(tl.sum(b_wide * b_wide, axis=0) / SIZE + eps)
    b_normed = (b_wide * ratio).to(b_x.dtype).to(tl.float32)
    b_weight = tl.load(weight + o_x, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + o_x, (b_weight * b_normed).to(b_x.dtype), mask=mask)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, inner: int = 1
) -> None:
    """RMS norm of pieces of x as long as the weight, `inner` of them in each of x's rows.

    x [T, inner * D], row stride free; residual [T, D] contiguous, written if given (+= x, whose
    norm it is then); weight [D]; out, contiguous, written; may be x. All in one dtype.
    """
    size = len(weight)
    block = triton.next_power_of_2(size)
    rows = x.shape[0] * inner
    if rows:
        norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, out, eps, x.stride(0),
            INNER=inner, SIZE=size, BLOCK=block, ADDS=residual is not None,
            num_warps=max(1, min(16, block // 512)), enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def silu_kernel(gate_up, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of the row)."""
    row = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_x < SIZE
    b_gate = tl.load(gate_up + row * stride + o_x, mask=mask, other=0.0)
    b_up = tl.load(gate_up + row * stride + SIZE + o_x, mask=mask, other=0.0)
    b_wide = b_gate.to(tl.float32)
    b_silu = (b_wide / (1.0 + tl.exp(-b_wide))).to(b_gate.dtype).to(tl.float32)
    tl.store(out + row * SIZE + o_x, (b_silu * b_up.to(tl.float32)).to(b_gate.dtype), mask=mask)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """cast(silu(gate)) * up. gate_up [T, 2 I], row stride free; out [T, I] contiguous, written."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if rows:
        silu_kernel[(rows, triton.cdiv(size, _SILU_BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            SIZE=size,
            BLOCK=_SILU_BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )

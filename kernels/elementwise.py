"""Norms and activation: rows in the model's dtype, arithmetic in fp32, rounded as transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.compiled import row_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """weight * cast(x / rms(x)) per row.

    x [T, D], row stride free; weight [D] in x's dtype; out [T, D] contiguous, written (None: a
    new tensor) and returned.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _norm(False, x, x, weight, eps, out)
    return out


def qk_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of queries or keys, over each head or over all heads together.

    x [T, heads, head_dim], only the last two dimensions contiguous; weight [head_dim] or
    [heads * head_dim] in x's dtype, which says over what; returns a new [T, heads, head_dim].
    """
    if x.is_cuda:
        from kernels import triton_elementwise

        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        pieces = x.shape[1] * x.shape[2] // len(weight)
        triton_elementwise.norm(x, None, weight, eps, out, pieces)
        return out
    return rms_norm(x.reshape(-1, len(weight)), weight, eps).view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x, rounded to the dtype; then the RMS norm of the new residual.

    x [T, D]; residual [T, D] contiguous, written; out [T, D], written (None: a new tensor) and
    returned; may be x.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _norm(True, x, residual, weight, eps, out)
    return out


def _norm(adds: bool, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    if x.is_cuda:
        from kernels import triton_elementwise

        triton_elementwise.norm(x, residual if adds else None, weight, eps, out)
        return
    parallel, rows_cpu = row_kernels()
    rows, dim = x.shape
    bf16 = _is_bf16(x, dim)
    rows_cpu.norm_rows(
        bf16,
        adds,
        x.data_ptr(),
        x.stride(0) * (2 if bf16 else 4),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        dim,
        eps,
        parallel.num_threads(),
        rows_cpu.NORM.address,
    )


def _is_bf16(x: Tensor, dim: int) -> bool:
    if dim % 16 or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"rows of {dim} {x.dtype} are not multiples of 16 in fp32 or bf16")
    return x.dtype == torch.bfloat16


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """cast(silu(gate)) * up.

    gate_up [T, 2 I], gate first; out [T, I] contiguous, written (None: a new tensor), returned.
    """
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, dim), dtype=gate_up.dtype, device=gate_up.device)
    if gate_up.is_cuda:
        from kernels import triton_elementwise

        triton_elementwise.silu_mul(gate_up, out)
        return out
    parallel, rows_cpu = row_kernels()
    bf16 = _is_bf16(gate_up, dim)
    rows_cpu.silu_rows(
        bf16,
        gate_up.data_ptr(),
        gate_up.stride(0) * (2 if bf16 else 4),
        out.data_ptr(),
        rows,
        dim,
        parallel.num_threads(),
        rows_cpu.SILU.address,
    )
    return out

"""Norms and activation: rows in the model's dtype, arithmetic in fp32, rounded as transformers."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """weight * cast(x / rms(x)) per row.

    x [T, D], row stride free; weight [D] in x's dtype; out [T, D] contiguous, written (None: a
    new tensor) and returned.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    return torch.mul(weight, normed.to(x.dtype), out=out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x, rounded to the dtype; then the RMS norm of the new residual.

    x [T, D]; residual [T, D] contiguous, written; out [T, D], written (None: a new tensor) and
    returned; may be x.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps, out)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """cast(silu(gate)) * up.

    gate_up [T, 2 I], gate first; out [T, I] contiguous, written (None: a new tensor), returned.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    activated = torch.nn.functional.silu(gate)
    out = torch.empty(up.shape, dtype=up.dtype) if out is None else out
    return torch.mul(activated, up, out=out)

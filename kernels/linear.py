"""Linear layers whose weight is laid out once for the CPU's GEMM kernels."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows that oneDNN lays the weight out for. Without a hint it plans for one row, and fp32 weights
# are laid out again at every call with more; 32 is the best or within 3 % of it at 1 to 512 rows.
_LAYOUT_ROWS = 32
_pointwise = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear:
    """x -> x W^T + b with W packed once. Immutable after construction; owns its copy of W."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], fp32 or bf16, on the CPU; bias [out] in the same dtype."""
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{weight.dtype} is not supported: fp32 or bf16")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._bias = bias
        dense = weight.detach().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense, _LAYOUT_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in], contiguous, in the weight's dtype, any T; returns a new [T, out]."""
        result: Tensor = _pointwise(x, self._packed, self._bias, "none", [], "")
        return result

"""Linear layers whose weight is laid out once for the CPU's GEMM kernels."""

from __future__ import annotations

import torch
from torch import Tensor


class PackedLinear:
    """x -> x W^T + b with W packed once. Immutable after construction; owns its copy of W."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], fp32 or bf16, on the CPU; bias [out] in the same dtype."""
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in], contiguous, in the weight's dtype, any T; returns a new [T, out]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return result

"""Linear layers: on the CPU their weight is laid out once for its GEMM kernels, on CUDA kept."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Rows that oneDNN lays the weight out for. Without a hint it plans for one row, and fp32 weights
# are laid out again at every call with more; 32 is the best or within 3 % of it at 1 to 512 rows.
_LAYOUT_ROWS = 32
_pointwise = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear:
    """x -> x W^T + b. Immutable after construction; on the CPU it owns its own copy of W."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], fp32 or bf16, on the CPU or a CUDA device; bias [out] likewise."""
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{weight.dtype} is not supported: fp32 or bf16")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._bias = bias
        self._on_cpu = not weight.is_cuda
        self._weight = weight.detach().contiguous()
        if self._on_cpu:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _LAYOUT_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in], contiguous, in the weight's dtype and place, any T; returns a new [T, out]."""
        if self._on_cpu:
            result: Tensor = _pointwise(x, self._weight, self._bias, "none", [], "")
            return result
        return functional.linear(x, self._weight, self._bias)

"""Compile, or load from the cache on disk, every CPU kernel before the first request."""

from __future__ import annotations

import torch


def warm_up(dtype: torch.dtype, head_dim: int = 64) -> None:
    """Make all kernels ready for this dtype (fp32 or bf16) and head size."""

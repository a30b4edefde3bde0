"""How far a kernel may be from its fp32 reference: per dtype, largest difference and RMS ratio."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """max_abs: of values of about 1; rms: the difference's RMS over that of the values."""

    max_abs: float
    rms: float


# bf16 attention: weights rounded to bf16 (2^-9 relative), sums in fp32
ATTENTION = {
    torch.float32: Tolerance(2e-5, 2e-6),
    torch.float16: Tolerance(1e-3, 4e-4),
    torch.bfloat16: Tolerance(8e-3, 2.5e-3),
}
# scores of several hundred: their own fp32 rounding is 3e-5
LARGE_SCORES = {
    torch.float32: Tolerance(2e-3, 2e-4),
    torch.float16: Tolerance(2e-3, 4e-4),
    torch.bfloat16: Tolerance(8e-3, 2.5e-3),
}
LSE = {
    torch.float32: Tolerance(2e-5, 2e-6),
    torch.float16: Tolerance(2e-5, 2e-6),
    torch.bfloat16: Tolerance(4e-3, 1e-3),
}
# one rounding of the result to the dtype, or two
ROWS = {
    torch.float32: Tolerance(2e-5, 1e-6),
    torch.float16: Tolerance(5e-3, 6e-4),
    torch.bfloat16: Tolerance(4e-2, 4e-3),
}
LINEAR = {torch.float32: Tolerance(1e-3, 2e-6), torch.bfloat16: Tolerance(0.5, 3e-3)}

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
]


def assert_close(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    """Same infinities, no NaN, and finite values within both bounds."""
    actual, expected = actual.float(), expected.float()
    assert actual.shape == expected.shape
    infinite = expected.isinf()
    assert torch.equal(actual[infinite], expected[infinite])
    actual, expected = actual[~infinite], expected[~infinite]
    assert actual.isfinite().all()
    if not actual.numel():
        return
    difference = actual - expected
    assert difference.abs().max().item() <= tolerance.max_abs
    scale = expected.pow(2).mean().sqrt().item()
    assert difference.pow(2).mean().sqrt().item() <= tolerance.rms * max(scale, 1e-6)

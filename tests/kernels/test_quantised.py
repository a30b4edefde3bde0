"""Projections on 4-bit and 8-bit grids against full products, and what they promise about rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.quantised import Bits, Grid, QuantisedLinear, eight_bit_grid, four_bit_grid
from tests.kernels.tolerances import DTYPES

ROOT = Path(__file__).parents[2]


def four_bit_weight(out: int, inner: int) -> Tensor:
    """Random numbers on a grid such as a Q4_1 file brings."""
    shape = (out, inner // 32)
    scale = (torch.rand(shape) * 0.02 + 1e-3).half()
    offset = (-torch.rand(shape) * 0.2).half()
    codes = torch.randint(0, 16, (*shape, 32))
    codes[..., 3], codes[..., 20] = 0, 15  # as every block has that was rounded to its range
    return (codes * scale.float()[..., None] + offset.float()[..., None]).flatten(1)


def make_grid(bits: Bits, out: int, inner: int) -> Grid:
    if bits == 8:
        return eight_bit_grid(torch.randn(out, inner))
    found = four_bit_grid(four_bit_weight(out, inner))
    assert found is not None
    return found


def rms(value: Tensor) -> float:
    return float(value.double().pow(2).mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 31, 300])
@pytest.mark.parametrize(("out", "inner"), [(16, 32), (960, 576), (259, 128)])
def test_products(out: int, inner: int, rows: int, bits: Bits, dtype: torch.dtype) -> None:
    grid = make_grid(bits, out, inner)
    x = (torch.randn(rows, inner) * torch.rand(inner) * 8).to(dtype)
    bias = torch.randn(out)
    result = QuantisedLinear(grid, bias)(x)
    assert result.dtype == dtype
    assert result.shape == (rows, out)
    assert result.is_contiguous()
    expected = reference.quantised_linear(x, grid.weight()) + bias
    rounding = 2e-6 if dtype == torch.float32 else 2.5e-3
    assert rms(result - expected) < rounding * rms(expected)
    exact = x.double() @ grid.weight().double().T + bias
    assert rms(result - exact) < 0.012 * rms(exact)  # what 8 bits cost: 127 steps to the largest


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_layer_rounds_its_inputs_far_less(dtype: torch.dtype) -> None:
    grid = make_grid(8, 960, 576)
    x = torch.randn(33, 576).to(dtype)
    result = QuantisedLinear(grid, wide=True)(x)
    assert result.dtype == torch.float32
    exact = x.double() @ grid.weight().double().T
    assert rms(result - exact) < 5e-5 * rms(exact)
    expected = reference.quantised_linear(x, grid.weight(), planes=2)
    assert rms(result - expected) < 3e-6 * rms(expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("wide", [False, True])
def test_a_row_never_depends_on_the_rows_beside_it(bits: Bits, wide: bool) -> None:
    """Bit for bit, at any number of rows, at any place, in chunks or not, on any threads."""
    if wide and bits == 4:
        pytest.skip("wide layers have 8 bits")
    layer = QuantisedLinear(make_grid(bits, 960, 1536), wide=wide)
    x = torch.randn(400, 1536).bfloat16()
    x[7] *= 1e4
    x[8] = 0
    whole = layer(x)
    assert not whole[8].any()
    for start, stop in ((0, 1), (5, 8), (6, 9), (3, 16), (100, 131), (1, 400)):
        assert torch.equal(layer(x[start:stop]), whole[start:stop]), (start, stop)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(layer(x), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_last_outputs_alone(bits: Bits) -> None:
    bias = torch.randn(960)
    layer = QuantisedLinear(make_grid(bits, 960, 576), bias)
    x = torch.randn(9, 576).bfloat16()
    part = layer.last_rows(384)
    assert torch.equal(part(x), layer(x)[:, -384:])
    assert part.buffers[0].untyped_storage().data_ptr() == layer.buffers[0].data_ptr()
    with pytest.raises(ValueError, match="multiple of 16"):
        layer.last_rows(100)


def test_a_grid_is_found_only_where_every_number_lies_on_it() -> None:
    weight = four_bit_weight(48, 96)
    grid = four_bit_grid(weight)
    assert grid is not None
    assert torch.equal(grid.weight(), weight)
    moved = weight.clone()
    moved[17, 40] += 1e-5
    assert four_bit_grid(moved) is None
    assert four_bit_grid(torch.randn(4, 32)) is None
    assert four_bit_grid(torch.randn(4, 48)) is None
    flat = four_bit_grid(torch.full((4, 32), 0.5))
    assert flat is not None
    assert torch.equal(flat.weight(), torch.full((4, 32), 0.5))


def test_eight_bits_keep_a_q8_0_tensor_and_are_near_any_other() -> None:
    scale = (torch.rand(64, 3) * 1e-2).half().float()[..., None]
    codes = torch.randint(-127, 128, (64, 3, 32))
    codes[..., 0] = 127
    weight = (codes * scale).flatten(1)
    assert torch.equal(eight_bit_grid(weight).weight(), weight)
    for size in (1e-3, 1.0, 1e4):  # with subnormal scales too
        other = torch.randn(64, 96) * size
        difference = (eight_bit_grid(other).weight() - other).view(64, 3, 32).abs().amax(-1)
        assert (difference <= 0.0062 * other.view(64, 3, 32).abs().amax(-1)).all()
    assert torch.equal(eight_bit_grid(torch.zeros(16, 32)).weight(), torch.zeros(16, 32))
    with pytest.raises(ValueError, match="8 million"):
        eight_bit_grid(torch.full((16, 32), 1e9))


def test_what_does_not_fit_is_refused() -> None:
    layer = QuantisedLinear(make_grid(8, 32, 64))
    with pytest.raises(ValueError, match="64 inputs"):
        layer(torch.zeros(2, 32))
    with pytest.raises(ValueError, match="float16"):
        layer(torch.zeros(2, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="8 bits"):
        QuantisedLinear(make_grid(4, 32, 64), wide=True)


SCRIPT = """
import torch
from kernels import reference
from kernels.quantised import QuantisedLinear, eight_bit_grid, is_fast
assert not is_fast()
torch.manual_seed(0)
grid = eight_bit_grid(torch.randn(48, 96))
x = torch.randn(5, 96)
difference = QuantisedLinear(grid)(x) - reference.quantised_linear(x, grid.weight())
assert difference.abs().max() < 1e-4
"""


def test_without_avx512(tmp_path: Path) -> None:
    """The same numbers on a CPU that has no instruction for products of bytes."""
    if "avx2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("only x86-64 with AVX2 can compile for a Haswell")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, cwd=ROOT)

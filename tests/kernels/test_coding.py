"""Coded hidden states and K/V: bit for bit their reference, and no farther off than a code is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import coding
from kernels import reference_coding as reference
from tests.kernels.tolerances import DTYPES

BITS = [8, 6]


def layers_of(dtype: torch.dtype, num_layers: int, rows: int, width: int) -> Tensor:
    """A residual stream: it grows from layer to layer, and some rows are far larger."""
    torch.manual_seed(rows)
    steps = torch.randn(num_layers, rows, width).cumsum(0)
    return (steps * torch.logspace(-3, 3, rows)[:, None]).to(dtype)


def decoded(
    coded: Tensor, rows: int, bits: int, count: int, width: int, dtype: torch.dtype
) -> Tensor:
    """All layers' first rows, one after another as a restore has them; [layers, count, width]."""
    total = torch.zeros(count, width)
    back = torch.full((len(coded), count, width), float("nan"), dtype=dtype)
    for raw, out in zip(coded, back, strict=True):
        coding.decode_hidden(raw, rows, bits, total, out)
    return back


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (63, 128), (64, 576)])
def test_hidden_states_are_coded_as_by_the_reference(
    dtype: torch.dtype, bits: int, rows: int, width: int
) -> None:
    hidden = layers_of(dtype, 5, rows, width)
    coded = coding.encode_hidden(hidden, bits)
    assert coded.shape == (5, rows * coding.hidden_row_bytes(width, bits))
    assert torch.equal(coded, reference.encode_hidden(hidden, bits))
    for count in {1, rows}:
        total = torch.zeros(count, width)
        expected = torch.empty(count, width, dtype=dtype)
        for raw, found in zip(coded, decoded(coded, rows, bits, count, width, dtype), strict=True):
            reference.decode_hidden(raw, rows, bits, total, expected)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", BITS)
def test_errors_do_not_add_up_over_the_layers(bits: int) -> None:
    """Each layer is as far off as one code of its difference to the layer before."""
    rows, width = 64, 576
    hidden = layers_of(torch.float32, 30, rows, width)
    coded = coding.encode_hidden(hidden, bits)
    back = decoded(coded, rows, bits, rows, width, torch.float32)
    for layer in range(30):
        step = hidden[layer] - (back[layer - 1] if layer else 0)
        off = hidden[layer] - back[layer]
        # half a code; a scale's rounding (2^-9) moves the largest by up to a quarter more
        limit = step.abs().amax(dim=1) / 127 * 0.76 if bits == 8 else step.abs().amax(dim=1) * 0.25
        assert bool((off.abs().amax(dim=1) <= limit).all())
        rms = off.pow(2).mean(dim=1).sqrt() / step.pow(2).mean(dim=1).sqrt()
        assert float(rms.max()) < (0.011 if bits == 8 else 0.037)


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_zeros_and_views_of_a_larger_buffer(bits: int) -> None:
    staging = torch.randn(7, 3, 64, 128, dtype=torch.bfloat16)
    hidden = staging[4, 1:, :10]
    hidden[:, 3] = 0
    coded = coding.encode_hidden(hidden, bits)
    assert torch.equal(coded, coding.encode_hidden(hidden.contiguous(), bits))
    back = decoded(coded, 10, bits, 10, 128, torch.bfloat16)
    assert bool((back[:, 3] == 0).all())
    assert not bool(back.isnan().any())


def test_what_came_back_is_coded_as_it_was() -> None:
    """A restored partial stripe is coded again when it has grown: one layer's codes stay."""
    hidden = layers_of(torch.float32, 1, 63, 576)
    coded = coding.encode_hidden(hidden, 8)
    back = decoded(coded, 63, 8, 63, 576, torch.float32)
    assert torch.equal(coding.encode_hidden(back, 8), coded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (63, 40), (64, 64)])
def test_kv_is_coded_as_by_the_reference(dtype: torch.dtype, rows: int, count: int) -> None:
    torch.manual_seed(rows)
    kv = torch.randn(4, 2, 256, 3, 64)
    kv[..., 5] *= 30  # a channel that stands out, as K has
    kv = kv.to(dtype)
    coded = coding.encode_kv(kv[1:3], 64, rows)
    assert coded.shape == (2, rows * coding.kv_row_bytes(3, 64))
    assert torch.equal(coded, reference.encode_kv(kv[1:3], 64, rows))
    found, expected = torch.full_like(kv, float("nan")), torch.full_like(kv, float("nan"))
    coding.decode_kv(coded, rows, found[1:3], slice(128, 128 + count))
    reference.decode_kv(coded, rows, expected[1:3], slice(128, 128 + count))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert int((~found.isnan()).sum()) == 2 * 2 * count * 3 * 64
    before = kv[1:3, :, 64 : 64 + count].float()
    off = (found[1:3, :, 128 : 128 + count].float() - before).abs().amax(dim=-1)
    # half a code, and the result's rounding to bf16
    assert bool((off <= before.abs().amax(dim=-1) * (0.76 / 127 + 2**-8)).all())


def test_levels_are_the_closest_ones() -> None:
    """The table of bins gives the level closest to a number, but for a hair beside the borders."""
    values = torch.linspace(-4.4, 4.4, 100_001)
    bins = ((values / reference.REACH + 1) * len(reference.level_bins()) / 2).long()
    found = reference.LEVELS[reference.level_bins()[bins].long()]
    best = (values[:, None] - reference.LEVELS[None]).abs().amin(dim=1)
    assert float(((values - found).abs() - best).max()) < 2.3e-3

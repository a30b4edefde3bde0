"""The merge of attention states: exact, whatever the sizes of the parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.attention import merge_states
from tests.kernels.tolerances import DTYPES, ROWS, assert_close


def _states(lse: Tensor, dim: int = 64) -> tuple[Tensor, Tensor]:
    """Random states with these levels; what an empty one has for out is not to be read."""
    out = torch.randn(*lse.shape, dim)
    out[torch.isneginf(lse)] = float("nan")
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 6])
def test_levels_of_plus_and_minus_50(dtype: torch.dtype, parts: int, dim: int) -> None:
    choices = torch.tensor([-50.0, 0.0, 50.0, float("-inf"), 1.5])
    lse = choices[torch.randint(0, 5, (parts, 7, 3))]
    lse[:, 2] = float("-inf")
    out, lse = _states(lse, dim)
    result = torch.full((7, 3, dim), float("nan")).to(dtype)
    merge_states(out, lse, result)
    assert_close(result, reference.merge_states(out, lse), ROWS[dtype])


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_all_parts_empty_is_zero(parts: int) -> None:
    result = torch.full((4, 2, 64), float("nan"))
    merge_states(*_states(torch.full((parts, 4, 2), float("-inf"))), result)
    assert (result == 0).all()


def test_one_part_is_copied() -> None:
    out, lse = _states(torch.randn(1, 5, 3) * 40)
    result = torch.full((5, 3 * 64), float("nan"))
    merge_states(out, lse, result)
    assert torch.equal(result.view(5, 3, 64), out[0])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_many_rows_on_several_threads_and_nothing_beside_them(parts: int) -> None:
    out, lse = _states(torch.randn(parts, 500, 9) * 5)
    around = torch.full((502, 9 * 64), float("nan"))
    merge_states(out, lse, around[1:501])
    assert_close(around[1:501], reference.merge_states(out, lse).view(500, -1), ROWS[torch.float32])
    assert around[[0, 501]].isnan().all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=6), st.integers(0, 2**31))
def test_any_order_gives_the_same(levels: list[float], seed: int) -> None:
    torch.manual_seed(seed)
    out, lse = _states(torch.tensor(levels)[:, None, None].expand(-1, 2, 1).contiguous(), 16)
    one, two = torch.empty(2, 1, 16), torch.empty(2, 1, 16)
    merge_states(out, lse, one)
    merge_states(out.flip(0), lse.flip(0), two)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    assert_close(one, reference.merge_states(out, lse), ROWS[torch.float32])


def test_other_shapes_are_refused() -> None:
    out, lse = _states(torch.zeros(2, 3, 1))
    with pytest.raises(ValueError, match="do not fit"):
        merge_states(out, lse, torch.empty(4, 1, 64))
    with pytest.raises(ValueError, match="contiguous"):
        merge_states(out, lse, torch.empty(3, 2, 64)[:, :1])
    with pytest.raises(ValueError, match="float16"):
        merge_states(out, lse, torch.empty(3, 1, 64, dtype=torch.float16))

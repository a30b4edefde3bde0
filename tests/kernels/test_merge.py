"""The merge of attention states: exact, whatever the sizes of the parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.attention import merge_states
from tests.kernels.tolerances import DTYPES, MERGE, ROWS, assert_close


def _state(lse: Tensor, dim: int = 64) -> tuple[Tensor, Tensor]:
    out = torch.randn(*lse.shape, dim)
    out[torch.isneginf(lse)] = 0
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_levels_of_plus_and_minus_50(dtype: torch.dtype, parts: int) -> None:
    choices = torch.tensor([-50.0, 0.0, 50.0, float("-inf"), 1.5])
    states = [_state(choices[torch.randint(0, 5, (7, 3))]) for _ in range(parts)]
    states[0][1][2] = float("-inf")
    states[0][0][2] = 0
    result = torch.full((7, 3, 64), float("nan")).to(dtype)
    merge_states(states, result)
    assert_close(result, reference.merge_states(states), (ROWS if parts < 3 else MERGE)[dtype])


@pytest.mark.parametrize("parts", [2, 3])
def test_all_parts_empty_is_zero(parts: int) -> None:
    empty = torch.full((4, 2), float("-inf"))
    result = torch.full((4, 2, 64), float("nan"))
    merge_states([_state(empty) for _ in range(parts)], result)
    assert (result == 0).all()


def test_an_empty_part_s_out_is_not_looked_at() -> None:
    full = _state(torch.zeros(4, 2))
    junk = (torch.full((4, 2, 64), float("nan")), torch.full((4, 2), float("-inf")))
    result = torch.empty(4, 2, 64)
    for states in ([full, junk], [junk, full]):
        merge_states(states, result)
        assert torch.equal(result, full[0])


def test_many_rows_on_several_threads() -> None:
    states = [_state(torch.randn(500, 9) * 5) for _ in range(2)]
    result = torch.empty(500, 9 * 64)
    merge_states(states, result)
    expected = reference.merge_states(states).view(500, -1)
    assert_close(result, expected, ROWS[torch.float32])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-60, 60), min_size=2, max_size=4), st.integers(0, 2**31))
def test_any_order_gives_the_same(levels: list[float], seed: int) -> None:
    torch.manual_seed(seed)
    states = [_state(torch.full((2, 1), level), 16) for level in levels]
    one, two = torch.empty(2, 1, 16), torch.empty(2, 1, 16)
    merge_states(states, one)
    merge_states(states[::-1], two)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert_close(one, reference.merge_states(states), MERGE[torch.float32])

"""On CUDA: the merge of states, the writers of the cache, norms and activation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.kv import rope_table
from tests.kernels.tolerances import ROWS, assert_close
from tests.kernels.triton_cases import (
    NAN,
    ONE_PLACE,
    PLACES,
    Place,
    assert_frame_untouched,
    nan_states,
    to_device,
)

pytest.importorskip("triton")

DIMS = [64, 80, 96, 128, 256]


def _framed(rows: int, width: int, place: Place) -> Tensor:
    """[rows, width] of NaN inside a larger tensor of NaN, rows apart from one another."""
    return torch.full((rows + 2, width + 32), NAN, dtype=place.dtype, device=place.device)[
        1:-1, 16:-16
    ]


def _assert_edges_untouched(view: Tensor) -> None:
    base = view._base
    assert base is not None
    frame = base.clone()
    frame[1:-1, 16:-16] = NAN
    assert frame.isnan().all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("states", "dim"), [(1, 64), (2, 80), (3, 128), (6, 96), (2, 256)])
def test_merge_of_states_some_of_them_empty(place: Place, states: int, dim: int) -> None:
    """LSEs of 0, +-50, +-1e4 and -inf; an empty state's out is NaN and must not be read."""
    from kernels.triton_merge import merge_states

    rows, heads = 5, 3
    levels = torch.tensor([0.0, 50.0, -50.0, 1e4, -1e4, float("-inf"), float("-inf")])
    lse = levels[torch.randint(0, len(levels), (states, rows, heads))] + torch.randn(rows, heads)
    lse[:, 0] = float("-inf")
    out = torch.randn(states, rows, heads, dim)
    out[lse == float("-inf")] = NAN
    framed_out, framed_lse = nan_states(states, rows, heads, dim, place.device)
    framed_out.copy_(out)
    framed_lse.copy_(lse)
    result = _framed(rows, heads * dim, place)
    merge_states(framed_out, framed_lse, result)
    expected = reference.merge_states(out, lse)
    assert_close(result.cpu().view(rows, heads, dim), expected, ROWS[place.dtype])
    assert not result[0].any()
    _assert_edges_untouched(result)
    assert_frame_untouched(framed_out)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("heads", [0, 3, 9])
@pytest.mark.parametrize("dim", DIMS)
def test_write_kv_rotates_and_scatters(place: Place, heads: int, dim: int) -> None:
    from kernels.triton_kv import write_kv

    rows, kv_heads = 3, 2
    fused = torch.randn(rows, heads + 2 * kv_heads, dim).to(place.dtype)
    q, k, v = to_device(fused, place).split([heads, kv_heads, kv_heads], dim=1)
    shape = (128, kv_heads, dim)
    k_cache, v_cache = (
        torch.full(shape, NAN, dtype=place.dtype, device=place.device) for _ in range(2)
    )
    table = rope_table(10_000.0 ** -(torch.arange(0, dim, 2) / dim), 500)
    positions, slots = torch.tensor([0, 499, 77]), torch.tensor([127, 0, 64])
    write_kv(
        q if heads else None, k, v, table.to(place.device), positions.to(place.device),
        slots.to(place.device), k_cache, v_cache,
    )  # fmt: skip
    rotated = reference.rope(fused[:, : heads + kv_heads], table, positions)
    assert_close(q.cpu(), rotated[:, :heads], ROWS[place.dtype])
    assert_close(k_cache.cpu()[slots], rotated[:, heads:], ROWS[place.dtype])
    assert torch.equal(v_cache.cpu()[slots], fused[:, heads + kv_heads :])
    assert torch.equal(k.cpu(), fused[:, heads : heads + kv_heads])
    for cache in (k_cache, v_cache):
        cache[slots.to(place.device)] = NAN
        assert cache.isnan().all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 80), (9, 128)])
def test_rows_are_copied_bit_for_bit(place: Place, kv_heads: int, dim: int) -> None:
    """Both ways, bits that are no numbers included; other slots keep what they hold."""
    from kernels.triton_kv import copy_rows

    size = kv_heads * dim
    integer = torch.int16 if place.dtype.itemsize == 2 else torch.int32
    bits = torch.randint(-(1 << 15), 1 << 15, (4, 2 * size), dtype=integer)
    rows = _framed(4, 2 * size, place)
    rows.copy_(bits.view(place.dtype).to(place.device))
    shape = (128, kv_heads, dim)
    k_cache, v_cache = (
        torch.zeros(shape, dtype=place.dtype, device=place.device) for _ in range(2)
    )
    slots = torch.tensor([127, 3, 64, 0], device=place.device)
    copy_rows(True, rows, slots, k_cache, v_cache)
    stored = torch.cat([cache[slots].view(4, size) for cache in (k_cache, v_cache)], dim=1)
    assert torch.equal(stored.view(integer).cpu(), bits)
    back = _framed(4, 2 * size, place)
    copy_rows(False, back, slots, k_cache, v_cache)
    assert torch.equal(back.contiguous().view(integer).cpu(), bits)
    _assert_edges_untouched(back)
    for cache in (k_cache, v_cache):
        cache[slots] = 0
        assert not cache.view(integer).any()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dim", [576, 2048, 5120])
@pytest.mark.parametrize("adds", [False, True])
def test_norm_of_rows(place: Place, dim: int, adds: bool) -> None:
    from kernels.triton_elementwise import norm

    fused = torch.randn(3, dim + 16).to(place.dtype)
    residual = torch.randn(3, dim).to(place.dtype) if adds else None
    weight = torch.rand(dim).to(place.dtype) + 0.5
    x = to_device(fused, place)[:, :dim]
    moved = None if residual is None else to_device(residual, place)
    out = torch.full((3, dim), NAN, dtype=place.dtype, device=place.device)
    norm(x, moved, to_device(weight, place), 1e-5, out)
    total = fused[:, :dim] if residual is None else residual + fused[:, :dim]
    assert_close(out.cpu(), reference.rms_norm(total, weight, 1e-5), ROWS[place.dtype])
    if moved is not None:
        assert_close(moved.cpu(), total, ROWS[place.dtype])
    assert torch.equal(x.cpu(), fused[:, :dim])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("whole", [False, True], ids=["per-head", "all-heads"])
def test_norm_of_queries_within_a_fused_row(place: Place, whole: bool) -> None:
    from kernels.triton_elementwise import norm

    heads, dim = 3, 80
    fused = torch.randn(4, heads + 2, dim).to(place.dtype)
    weight = torch.rand(heads * dim if whole else dim).to(place.dtype) + 0.5
    x = to_device(fused, place)[:, :heads]
    out = torch.full((4, heads, dim), NAN, dtype=place.dtype, device=place.device)
    norm(x, None, to_device(weight, place), 1e-6, out, inner=1 if whole else heads)
    pieces = fused[:, :heads].reshape(-1, len(weight))
    expected = reference.rms_norm(pieces, weight, 1e-6).view(4, heads, dim)
    assert_close(out.cpu(), expected, ROWS[place.dtype])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [48, 1536])
def test_silu_mul(place: Place, size: int) -> None:
    from kernels.triton_elementwise import silu_mul

    fused = torch.randn(3, 2 * size + 16).to(place.dtype) * 4
    gate_up = to_device(fused, place)[:, : 2 * size]
    out = torch.full((3, size), NAN, dtype=place.dtype, device=place.device)
    silu_mul(gate_up, out)
    expected = reference.silu_mul(fused[:, : 2 * size])
    assert_close(out.cpu(), expected, ROWS[place.dtype])


@pytest.mark.parametrize("place", ONE_PLACE)
def test_no_rows_are_no_launch(place: Place) -> None:
    from kernels.triton_elementwise import norm, silu_mul
    from kernels.triton_kv import copy_rows, write_kv

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=place.dtype, device=place.device)

    none = torch.empty(0, dtype=torch.int64, device=place.device)
    caches = empty(64, 1, 64), empty(64, 1, 64)
    calls: list[Callable[[], None]] = [
        lambda: norm(empty(0, 64), None, empty(64), 1e-5, empty(0, 64)),
        lambda: silu_mul(empty(0, 64), empty(0, 32)),
        lambda: copy_rows(True, empty(0, 128), none, *caches),
        lambda: write_kv(
            empty(0, 2, 64), empty(0, 1, 64), empty(0, 1, 64), empty(8, 64), none, none, *caches
        ),
    ]
    for call in calls:
        call()


def test_shapes_that_do_not_fit_are_refused() -> None:
    from kernels.triton_kv import write_kv
    from kernels.triton_merge import merge_states

    with pytest.raises(ValueError, match="do not fit"):
        merge_states(torch.zeros(2, 3, 1, 64), torch.zeros(2, 2, 1), torch.zeros(3, 64))
    with pytest.raises(ValueError, match="do not fit"):
        merge_states(torch.zeros(2, 3, 1, 64), torch.zeros(2, 3, 1), torch.zeros(2, 64))
    index = torch.zeros(2, dtype=torch.int64)
    k, table = torch.zeros(2, 1, 64), torch.zeros(9, 64)
    small, cache = torch.zeros(64, 1, 32), torch.zeros(64, 1, 64)
    with pytest.raises(ValueError, match="do not fit"):
        write_kv(None, k, k, table, index, index, small, small)
    with pytest.raises(ValueError, match="int32 slots"):
        write_kv(None, k, k, table, index, index.int(), cache, cache)

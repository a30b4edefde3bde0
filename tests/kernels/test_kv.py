"""Cache writers: rotary embedding, scatter, restoration from hidden states, byte copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import kv, reference
from kernels.elementwise import rms_norm
from kernels.linear import PackedLinear
from tests.kernels.tolerances import DTYPES, ROWS, assert_close

SHAPES = [pytest.param(9, 3, 64), pytest.param(4, 4, 80), pytest.param(8, 2, 128)]


def _table(dim: int) -> Tensor:
    return kv.rope_table(10_000.0 ** -(torch.arange(0, dim, 2) / dim), 500)


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_write_kv_rotates_and_scatters_from_a_fused_row(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, rows: int
) -> None:
    fused = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    before = fused.clone()
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    caches = [torch.full((320, kv_heads, dim), float("nan")).to(dtype) for _ in range(2)]
    positions, slots = torch.randint(0, 500, (rows,)), torch.randperm(320)[:rows]
    kv.write_kv(q, k, v, _table(dim), positions, slots, *caches)
    rotated = reference.rope(before[:, : heads + kv_heads], _table(dim), positions)
    assert_close(q, rotated[:, :heads], ROWS[dtype])
    assert_close(caches[0][slots], rotated[:, heads:], ROWS[dtype])
    assert torch.equal(caches[1][slots], v)
    assert torch.equal(fused[:, heads:], before[:, heads:])
    untouched = torch.ones(320, dtype=torch.bool)
    untouched[slots] = False
    assert caches[0][untouched].isnan().all()
    assert caches[1][untouched].isnan().all()


def test_rope_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(5, 3, 64), torch.randn(5, 2, 64)
    positions, table = torch.tensor([0, 1, 7, 100, 499]), _table(64)
    cos, sin = (torch.cat([half, half], -1)[None] for half in table[positions].chunk(2, -1))
    expected = apply_rotary_pos_emb(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
    cache = torch.zeros(64, 2, 64)
    slots = torch.arange(5)
    kv.write_kv(q, k, k, table, positions, slots, cache, cache.clone())
    torch.testing.assert_close(q, expected[0][0].transpose(0, 1))
    torch.testing.assert_close(cache[:5], expected[1][0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_restore_equals_the_forward_pass(dtype: torch.dtype) -> None:
    """Restored from hidden states = written by a layer's fused q, k, v projection, in its order."""
    torch.manual_seed(0)
    heads, kv_heads, dim, width, rows = 9, 3, 64, 576, 70
    weight = torch.randn((heads + 2 * kv_heads) * dim, width).to(dtype) / 24
    norm = torch.rand(width).to(dtype) + 0.5
    hidden = torch.randn(rows, width).to(dtype) * 3
    positions, slots = torch.arange(20, 20 + rows), torch.randperm(128)[:rows]
    resident = [torch.zeros(128, kv_heads, dim, dtype=dtype) for _ in range(2)]
    restored = [torch.zeros(128, kv_heads, dim, dtype=dtype) for _ in range(2)]
    fused = PackedLinear(weight)(rms_norm(hidden, norm, 1e-5)).view(rows, -1, dim)
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    kv.write_kv(q, k, v, _table(dim), positions, slots, *resident)
    projection = PackedLinear(weight[heads * dim :])
    kv.restore_kv(hidden, norm, 1e-5, projection, _table(dim), positions, slots, *restored)
    for one, two in zip(resident, restored, strict=True):
        assert_close(two, one, ROWS[torch.float32] if dtype == torch.float32 else ROWS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 64, 130])
def test_saved_rows_come_back_bit_for_bit(dtype: torch.dtype, rows: int) -> None:
    kind = torch.int16 if dtype == torch.bfloat16 else torch.int32
    caches = [
        torch.randint(-(2**15), 2**15, (256, 3, 64), dtype=kind).view(dtype) for _ in range(2)
    ]
    slots = torch.randperm(256)[:rows]
    wide = torch.zeros(rows, 2 * 3 * 64 + 5, dtype=dtype)
    saved = wide[:, : 2 * 3 * 64]
    kv.gather_kv(slots, caches[0], caches[1], saved)
    back = [torch.zeros_like(cache) for cache in caches]
    kv.copy_kv(saved, slots, *back)
    for cache, copy in zip(caches, back, strict=True):
        assert torch.equal(copy.view(kind)[slots], cache.view(kind)[slots])
        assert int((copy.view(kind) != 0).any(-1).any(-1).sum()) <= rows
    assert (wide[:, -5:] == 0).all()


def test_copy_refuses_rows_of_another_width() -> None:
    cache = torch.zeros(64, 2, 64)
    with pytest.raises(ValueError, match="do not fit 256 a slot"):
        kv.copy_kv(torch.zeros(1, 128), torch.zeros(1, dtype=torch.int64), cache, cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layers", "rows", "width"), [(1, 1, 64), (3, 5, 64), (30, 33, 576)])
def test_hidden_states_go_to_their_places_and_nowhere_else(
    dtype: torch.dtype, layers: int, rows: int, width: int
) -> None:
    step, places = 7, 6 * 7 * 30
    source = torch.randn(layers + 1, rows, width).to(dtype)[1:]
    taken = torch.randperm(rows)[: max(1, rows - 2)]
    numbers = torch.arange(len(taken))
    targets = numbers // step * step * 30 + numbers % step  # a buffer is `step` rows of 30 layers
    staging = torch.full((places, width), float("nan"), dtype=dtype)
    kv.stage_rows(source, taken, targets, staging, step)
    expected = torch.full_like(staging, float("nan"))
    for layer in range(layers):
        expected[targets + layer * step] = source[layer, taken]
    assert torch.equal(staging.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert int((~staging.isnan()).all(-1).sum()) == layers * len(taken)


def test_staging_refuses_rows_of_another_width() -> None:
    index = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        kv.stage_rows(torch.zeros(1, 1, 64), index, index, torch.zeros(4, 128), 1)

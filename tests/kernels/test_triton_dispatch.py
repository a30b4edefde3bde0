"""The public functions take their CUDA path for CUDA tensors, and give the reference's results.

Without a device, CPU tensors pretend to be on one, and Triton's interpreter takes them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import attention, elementwise, kv, reference
from kernels.spans import Spans
from kernels.triton_spans import AttentionShape, DeviceSpans
from tests.kernels.tolerances import ATTENTION, ROWS, assert_close
from tests.kernels.triton_cases import ONE_PLACE, Pages, Place, caches, nan_states, queries

pytest.importorskip("triton")


class _Pretending(Tensor):
    """A CPU tensor that says that it is on a CUDA device; so do its views."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # torch declares a field
        return True


def _moved(tensor: Tensor, place: Place) -> Tensor:
    if place.device == "cuda":
        return tensor.cuda()
    pretending: Tensor = tensor.clone().as_subclass(_Pretending)
    return pretending


def _back(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor).cpu()


@pytest.mark.parametrize("place", ONE_PLACE)
def test_attention_and_merge(place: Place) -> None:
    """A step of a decode row, a prefill of three and a group of four, as one answer."""
    pages, heads, dim = Pages(), 4, 64
    node, own = pages.segment(70), [pages.segment(tokens) for tokens in (65, 3)]
    decode = Spans.build([(0, 1, [own[0]], False)])
    prefill = Spans.build([(1, 4, [own[1]], True)])
    groups = Spans.groups([[(0, 4, *node)]], 4)
    q = queries(4, heads, dim, place)
    k, v = caches(2, dim, place, [decode, prefill, groups])
    tensors = _moved(q, place), _moved(k, place), _moved(v, place)
    out, lse = (_moved(x, place) for x in nan_states(2, 4, heads, dim, "cpu"))
    shape = AttentionShape(heads, 2, dim, place.dtype)
    scale = 0.125
    programs = 4
    attention.decode_attention(
        *tensors, DeviceSpans.of(decode, shape, place.device, programs), scale, out, lse
    )
    attention.prefill_attention(
        *tensors, DeviceSpans.of(prefill, shape, place.device, programs), scale, out, lse
    )
    attention.prefix_attention(*tensors, groups, scale, out, lse)
    result = _moved(torch.zeros(4, heads * dim, dtype=place.dtype), place)
    attention.merge_states(out, lse, result)
    for row in range(4):
        slots = torch.cat([reference.slots_of(*node), reference.slots_of(*own[row > 0])])
        slots = slots[: len(slots) - (3 - row if row else 0)]
        expected, _ = reference.attention(q[row : row + 1], k[slots], v[slots], scale)
        assert_close(_back(result)[row].view(1, heads, dim), expected, ROWS[place.dtype])


def test_spans_on_the_cpu_in_the_devices_form() -> None:
    """The CPU kernels take what a `DeviceSpans` was filled with."""
    place = Place("cpu", torch.float32)
    spans = Spans.build([(0, 2, [Pages().segment(70)], False)])
    q = queries(2, 2, 64, place)
    k, v = caches(1, 64, place, [spans])
    made = DeviceSpans.of(spans, AttentionShape(2, 1, 64, place.dtype), "cpu")
    out, lse = (x.contiguous() for x in nan_states(1, 2, 2, 64, "cpu"))
    attention.prefix_attention(q, k, v, made, 0.125, out, lse)
    expected, expected_lse = nan_states(1, 2, 2, 64, "cpu")
    reference.span_attention(q, k, v, spans, 0.125, expected, expected_lse)
    assert_close(out, expected, ATTENTION[place.dtype])
    assert_close(lse, expected_lse, ATTENTION[place.dtype])


@pytest.mark.parametrize("place", ONE_PLACE)
@pytest.mark.parametrize("has_k_norm", [False, True])
def test_restored_keys_and_values(place: Place, has_k_norm: bool) -> None:
    """From hidden states by norm, projection, k-norm, rotation and scatter; then saved, loaded."""
    kv_heads, dim, width, rows = 2, 64, 96, 5
    hidden = torch.randn(rows, width).to(place.dtype)
    norm = torch.rand(width).to(place.dtype) + 0.5
    k_norm = torch.rand(dim).to(place.dtype) + 0.5 if has_k_norm else None
    weight = (torch.randn(2 * kv_heads * dim, width) / 10).to(place.dtype)
    moved_weight = weight.to(place.device)
    table = kv.rope_table(10_000.0 ** -(torch.arange(0, dim, 2) / dim), 50)
    positions, slots = torch.tensor([7, 0, 49, 3, 4]), torch.tensor([3, 127, 64, 0, 9])

    class Projection:
        def __call__(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, moved_weight)

    k_cache, v_cache = (
        _moved(torch.zeros(128, kv_heads, dim, dtype=place.dtype), place) for _ in range(2)
    )
    kv.restore_kv(
        _moved(hidden, place), _moved(norm, place), 1e-5, Projection(),
        _moved(table, place), _moved(positions, place), _moved(slots, place), k_cache, v_cache,
        None if k_norm is None else _moved(k_norm, place),
    )  # fmt: skip
    normed = reference.rms_norm(hidden, norm, 1e-5)
    projected = torch.nn.functional.linear(normed.float(), weight.float()).to(place.dtype)
    k, v = projected.view(rows, 2, kv_heads, dim).unbind(1)
    if k_norm is not None:
        k = reference.rms_norm(k, k_norm, 1e-5)
    expected = reference.rope(k, table, positions)
    assert_close(_back(k_cache)[slots], expected, ROWS[place.dtype])
    assert_close(_back(v_cache)[slots], v, ROWS[place.dtype])
    saved = _moved(torch.zeros(rows, 2 * kv_heads * dim, dtype=place.dtype), place)
    kv.gather_kv(_moved(slots, place), k_cache, v_cache, saved)
    assert torch.equal(_back(saved)[:, : kv_heads * dim], _back(k_cache)[slots].flatten(1))
    loaded = [_moved(torch.zeros_like(_back(k_cache)), place) for _ in range(2)]
    kv.copy_kv(saved, _moved(slots, place), *loaded)
    assert torch.equal(_back(loaded[0]), _back(k_cache))
    assert torch.equal(_back(loaded[1]), _back(v_cache))


@pytest.mark.parametrize("place", ONE_PLACE)
def test_norms_and_activation(place: Place) -> None:
    x, residual = (torch.randn(3, 96).to(place.dtype) for _ in range(2))
    weight = torch.rand(96).to(place.dtype) + 0.5
    moved, moved_residual = _moved(x, place), _moved(residual, place)
    tolerance = ROWS[place.dtype]
    normed = elementwise.rms_norm(moved, _moved(weight, place), 1e-5)
    assert_close(_back(normed), reference.rms_norm(x, weight, 1e-5), tolerance)
    added = elementwise.add_rms_norm(moved, moved_residual, _moved(weight, place), 1e-5, out=moved)
    assert added is moved
    assert_close(_back(moved), reference.rms_norm(x + residual, weight, 1e-5), tolerance)
    assert_close(_back(moved_residual), x + residual, tolerance)
    heads = torch.randn(3, 5, 32).to(place.dtype)
    for size in (32, 96):
        weights = weight[:size]
        per_head = elementwise.qk_norm(_moved(heads, place)[:, :3], _moved(weights, place), 1e-5)
        pieces = heads[:, :3].reshape(-1, size)
        expected = reference.rms_norm(pieces, weights, 1e-5).view(3, 3, 32)
        assert_close(_back(per_head), expected, tolerance)
    activated = elementwise.silu_mul(_moved(x, place))
    assert_close(_back(activated), reference.silu_mul(x), tolerance)


def test_the_cpu_needs_no_triton() -> None:
    """Importing and calling the CPU kernels works where Triton is not installed."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from kernels import attention, elementwise, kv, prefix_choice, triton_spans\n"
        "x = torch.ones(2, 64)\n"
        "assert elementwise.rms_norm(x, x[0], 0.0).eq(1).all()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)

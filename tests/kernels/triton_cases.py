"""Where the Triton tests run: in its interpreter on CPU tensors, or compiled on a CUDA device.

The interpreter multiplies bf16 matrices wrongly, so there the dtypes are fp32 and fp16; on CUDA
they are bf16 and fp32. Expected values are always made on the CPU.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.spans import PAGE_SIZE, Segment, Spans
from kernels.triton_spans import AttentionShape, DeviceSpans
from tests.kernels.tolerances import ATTENTION, LSE, Tolerance, assert_close

NUM_PAGES = 40
# three products of tf32 in place of one of fp32
TF32X3 = Tolerance(1e-4, 2e-5)
NAN = float("nan")


@dataclass(frozen=True)
class Place:
    device: str
    dtype: torch.dtype


_INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="kernels are compiled here; TRITON_INTERPRET=1 interprets them",
)
_ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs a CUDA device, and TRITON_INTERPRET unset",
    ),
]
FP32 = pytest.param(Place("cpu", torch.float32), id="interpreted-fp32", marks=_INTERPRETED)
FP16 = pytest.param(Place("cpu", torch.float16), id="interpreted-fp16", marks=_INTERPRETED)
CUDA = [
    pytest.param(Place("cuda", torch.bfloat16), id="cuda-bf16", marks=_ON_CUDA),
    pytest.param(Place("cuda", torch.float32), id="cuda-fp32", marks=_ON_CUDA),
]
PLACES = [FP32, FP16, *CUDA]
ONE_PLACE = [FP32, *CUDA]  # where the dtype makes no difference: the interpreter is slow


class Pages:
    """Hands out pages of a cache in random order, each once."""

    def __init__(self, seed: int = 0) -> None:
        self._free = random.Random(seed).sample(range(NUM_PAGES), NUM_PAGES)

    def segment(self, tokens: int) -> Segment:
        count = -(-tokens // PAGE_SIZE)
        pages, self._free = self._free[:count], self._free[count:]
        assert len(pages) == count
        return pages, tokens


def caches(kv_heads: int, dim: int, place: Place, spans: Sequence[Spans]) -> tuple[Tensor, Tensor]:
    """Random keys and values on the CPU; slots that no span reads hold NaN."""
    unread = torch.ones(NUM_PAGES * PAGE_SIZE, dtype=torch.bool)
    for each in spans:
        for at, tokens in each.segments.reshape(-1, 2).tolist():
            unread[reference.slots_of(each.pages[at:].tolist(), tokens)] = False
    k, v = (torch.randn(len(unread), kv_heads, dim).to(place.dtype) for _ in range(2))
    k[unread] = NAN
    v[unread] = NAN
    return k, v


def queries(rows: int, heads: int, dim: int, place: Place) -> Tensor:
    """On the CPU; views of wider fused rows, as the projection makes them."""
    return torch.randn(rows, heads + 3, dim).to(place.dtype)[:, :heads]


def nan_states(states: int, rows: int, heads: int, dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Inside larger tensors: what surrounds them is NaN too, and so has to stay."""
    out = torch.full((states + 2, rows + 2, heads, dim), NAN, device=device)
    lse = torch.full((states + 2, rows + 2, heads), NAN, device=device)
    return out[1:-1, 1:-1], lse[1:-1, 1:-1]


def assert_frame_untouched(view: Tensor) -> None:
    """All of the tensor that `nan_states` made the view of, but the view, is NaN."""
    base = view._base
    assert base is not None
    frame = base.clone()
    frame[1:-1, 1:-1] = NAN
    assert frame.isnan().all()


def to_device(tensor: Tensor, place: Place) -> Tensor:
    """In the place's dtype, with the strides that it has."""
    moved = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=place.dtype, device=place.device
    )
    return moved.copy_(tensor)


def all_to_device(q: Tensor, k: Tensor, v: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    return to_device(q, place), to_device(k, place), to_device(v, place)


def check_spans(
    place: Place,
    heads: tuple[int, int, int],
    rows: int,
    states: int,
    spans: Spans,
    programs: int,
    factor: float = 1.0,
    tolerance: Tolerance | None = None,
) -> DeviceSpans:
    """Run the kernel on random tensors and compare with full attention; what was run."""
    from kernels.triton_attention import span_attention

    num_heads, kv_heads, dim = heads
    q = queries(rows, num_heads, dim, place) * factor
    k, v = caches(kv_heads, dim, place, [spans])
    shape = AttentionShape(num_heads, kv_heads, dim, place.dtype)
    device_spans = DeviceSpans.of(spans, shape, place.device, programs)
    out, lse = nan_states(states, rows, num_heads, dim, place.device)
    device_spans.part_out.fill_(NAN)
    device_spans.part_lse.fill_(NAN)
    scale = dim**-0.5
    span_attention(*all_to_device(q, k, v, place), device_spans, scale, out, lse)
    expected, expected_lse = nan_states(states, rows, num_heads, dim, "cpu")
    reference.span_attention(q, k, v, spans, scale, expected, expected_lse)
    written = ~expected_lse.isnan()
    assert torch.equal(~lse.cpu().isnan(), written)
    assert torch.equal(~out.cpu().isnan().all(-1), written)
    if tolerance is None and place == Place("cuda", torch.float32):
        tolerance = TF32X3
    assert_close(out.cpu()[written], expected[written], tolerance or ATTENTION[place.dtype])
    assert_close(lse.cpu()[written], expected_lse[written], tolerance or LSE[place.dtype])
    assert_frame_untouched(out)
    assert_frame_untouched(lse)
    return device_spans

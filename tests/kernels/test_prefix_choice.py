"""The prefix part by torch's flash attention, and the choice of the faster kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels import prefix_choice, reference
from kernels.prefix_choice import choose_prefix_kernel, prefix_attention_torch
from kernels.spans import PAGE_SIZE, Spans
from kernels.triton_spans import AttentionShape, DeviceSpans
from tests.kernels.tolerances import ATTENTION, LSE, Tolerance, assert_close
from tests.kernels.triton_cases import (
    FP32,
    PLACES,
    Pages,
    Place,
    all_to_device,
    assert_frame_untouched,
    caches,
    nan_states,
    queries,
)

HEADS = [(3, 3, 64), (6, 2, 80), (4, 1, 96), (7, 1, 128), (2, 2, 256)]
# its out leaves in the dtype, and is rounded once more than the kernel's
ROUNDED = {**ATTENTION, torch.bfloat16: Tolerance(1.5e-2, 4e-3)}
BF16 = pytest.param(Place("cpu", torch.bfloat16), id="cpu-bf16")
# torch on the CPU needs no interpreter; on CUDA there is no fp32
TORCH_PLACES = [
    pytest.param(Place("cpu", torch.float32), id="cpu-fp32"),
    BF16,
    *(place for place in PLACES if place.id == "cuda-bf16"),
]


@pytest.mark.parametrize("place", TORCH_PLACES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_groups_by_flash_attention(place: Place, heads: tuple[int, int, int]) -> None:
    """Consecutive pages, scattered pages, two segments, and no keys; an inner state."""
    num_heads, kv_heads, dim = heads
    spans = Spans.build(
        [
            (1, 4, [(range(4), 250)], False),
            (4, 6, [([9, 4, 13], 130)], False),
            (6, 7, [], False),
            (7, 8, [([6], 63), ([7, 5], 65)], False),
        ],
        state=1,
    )
    q = queries(9, num_heads, dim, place)
    k, v = caches(kv_heads, dim, place, [spans])
    out, lse = nan_states(3, 9, num_heads, dim, place.device)
    prefix_attention_torch(*all_to_device(q, k, v, place), spans, dim**-0.5, out, lse)
    expected, expected_lse = nan_states(3, 9, num_heads, dim, "cpu")
    reference.span_attention(q, k, v, spans, dim**-0.5, expected, expected_lse)
    assert_close(out[1, 1:8].cpu(), expected[1, 1:8], ROUNDED[place.dtype])
    assert_close(lse[1, 1:8].cpu(), expected_lse[1, 1:8], LSE[place.dtype])
    out[1, 1:8], lse[1, 1:8] = float("nan"), float("nan")
    assert out.isnan().all()
    assert lse.isnan().all()
    assert_frame_untouched(out)


def test_keys_in_consecutive_slots_are_not_copied() -> None:
    cache = torch.randn(8 * PAGE_SIZE, 1, 64)
    pages = torch.tensor([2, 3, 4], dtype=torch.int32).numpy()
    view = prefix_choice._keys(cache, [pages[:1], pages[1:]], [64, 70])
    assert view.data_ptr() == cache[2 * PAGE_SIZE :].data_ptr()
    assert view.shape[0] == 134
    copied = prefix_choice._keys(cache, [pages[:1], pages[1:]], [63, 70])
    assert torch.equal(copied[63], cache[3 * PAGE_SIZE])
    assert copied.shape[0] == 133


def test_causal_spans_are_refused() -> None:
    spans = Spans.build([(0, 3, [([1], 5)], True)])
    cache, out, lse = torch.zeros(128, 1, 64), torch.zeros(1, 3, 1, 64), torch.zeros(1, 3, 1)
    with pytest.raises(ValueError, match="do not see all"):
        prefix_attention_torch(torch.zeros(3, 1, 64), cache, cache, spans, 1.0, out, lse)


def _timer(times: Iterator[float]) -> Callable[[Callable[[], None]], float]:
    def seconds(call: Callable[[], None]) -> float:
        call()
        return next(times)

    return seconds


@pytest.mark.parametrize("place", [FP32])
@pytest.mark.parametrize(("triton_s", "torch_s"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_is_chosen(place: Place, triton_s: float, torch_s: float) -> None:
    """Both are really called, Triton first; what is returned takes the same arguments."""
    pytest.importorskip("triton")
    from kernels.triton_attention import prefix_attention

    shape = AttentionShape(2, 1, 64, place.dtype)
    chosen = choose_prefix_kernel(shape, 2, 70, place.device, _timer(iter([triton_s, torch_s])))
    assert (chosen.triton_s, chosen.torch_s) == (triton_s, torch_s)
    assert chosen.kernel is (prefix_attention if triton_s < torch_s else prefix_attention_torch)
    spans = Spans.build([(0, 2, [Pages().segment(70)], False)])
    q = queries(2, 2, 64, place)
    k, v = caches(1, 64, place, [spans])
    made = DeviceSpans.of(spans, shape, place.device, 4)
    out, lse = nan_states(1, 2, 2, 64, place.device)
    chosen.kernel(q, k, v, made, 0.125, out, lse)
    expected, expected_lse = nan_states(1, 2, 2, 64, "cpu")
    reference.span_attention(q, k, v, spans, 0.125, expected, expected_lse)
    assert_close(out, expected, ATTENTION[place.dtype])
    assert_close(lse, expected_lse, LSE[place.dtype])


@pytest.mark.parametrize("place", [FP32])
def test_triton_where_torch_takes_no_such_dtype(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from kernels.triton_attention import prefix_attention

    monkeypatch.setattr(prefix_choice, "_takes", lambda q: False)
    shape = AttentionShape(2, 1, 64, place.dtype)
    chosen = choose_prefix_kernel(shape, 2, 10, place.device, _timer(iter([1.0])))
    assert chosen == prefix_choice.PrefixChoice(prefix_attention, 1.0, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_choice_on_a_device() -> None:
    chosen = choose_prefix_kernel(AttentionShape(32, 8, 128, torch.bfloat16), 32, 2048)
    assert chosen.torch_s is not None
    assert chosen.triton_s > 0
    assert chosen.torch_s > 0

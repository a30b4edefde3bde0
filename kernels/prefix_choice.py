"""The prefix part by torch's own flash attention, and the choice between it and Triton on CUDA."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.spans import PAGE_SIZE, Spans
from kernels.triton_spans import AttentionShape, DeviceSpans

PrefixKernel = Callable[[Tensor, Tensor, Tensor, Spans | DeviceSpans, float, Tensor, Tensor], None]

_TIMED_RUNS = 9


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Not causal; q [1, H, M, d], k and v [1, H, n, d]; (out, natural lse fp32 [1, H, M])."""
    if q.is_cuda:
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    else:
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    return result[0], result[1]


def _takes(q: Tensor) -> bool:
    return not q.is_cuda or q.dtype != torch.float32


def _keys(cache: Tensor, pages: list[NDArray[np.int32]], lengths: list[int]) -> Tensor:
    """[n, KVH, d] of the segments: a view when their slots follow one another, else a copy."""
    slots = [
        (ids.astype(np.int64)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[:length]
        for ids, length in zip(pages, lengths, strict=True)
    ]
    all_slots = np.concatenate(slots)
    first, count = int(all_slots[0]), len(all_slots)
    if np.array_equal(all_slots, np.arange(first, first + count)):
        return cache[first : first + count]
    return cache[torch.from_numpy(all_slots).to(cache.device)]


def prefix_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spans: Spans | DeviceSpans,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """`prefix_attention`, one span after another, by torch's flash attention.

    Out is rounded to q's dtype within; keys that are not in consecutive slots are gathered at each
    call; lengths and addresses are fixed in a captured graph. ValueError: a causal span, or a
    dtype that the device's flash attention does not take (fp32 on CUDA).
    """
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    if not _takes(q):
        raise ValueError("flash attention on CUDA takes no fp32")
    spans = spans.host if isinstance(spans, DeviceSpans) else spans
    for (start, stop, base, state), segments in zip(
        spans.rows.tolist(), spans.segments.tolist(), strict=True
    ):
        used = [(at, tokens) for at, tokens in segments if tokens]
        target, target_lse = out[state, start:stop], lse[state, start:stop]
        if not used:
            target.zero_()
            target_lse.fill_(-math.inf)
            continue
        if base + start < sum(tokens for _, tokens in used) - 1:
            raise ValueError(f"rows [{start}, {stop}) do not see all of their keys")
        lists = [spans.pages[at : at - (-tokens // PAGE_SIZE)] for at, tokens in used]
        lengths = [tokens for _, tokens in used]
        count = stop - start
        folded = q[start:stop].view(count, kv_heads, group, dim).transpose(0, 1)
        part, part_lse = _flash(
            folded.reshape(1, kv_heads, count * group, dim),
            _keys(k_cache, lists, lengths).transpose(0, 1)[None],
            _keys(v_cache, lists, lengths).transpose(0, 1)[None],
            scale,
        )
        shape = (kv_heads, count, group)
        target.view(count, kv_heads, group, dim).copy_(part.view(*shape, dim).transpose(0, 1))
        target_lse.view(count, kv_heads, group).copy_(part_lse.reshape(shape).transpose(0, 1))


def cuda_seconds(call: Callable[[], None]) -> float:
    """Median time of a call on the current CUDA device, compiled and warm; seconds."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(_TIMED_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class PrefixChoice:
    """The faster kernel for the prefix part, and what was measured, in seconds per call."""

    kernel: PrefixKernel
    triton_s: float
    torch_s: float | None  # None: torch takes no such dtype


def choose_prefix_kernel(
    shape: AttentionShape,
    rows: int,
    keys: int,
    device: torch.device | str = "cuda",
    seconds: Callable[[Callable[[], None]], float] = cuda_seconds,
) -> PrefixChoice:
    """Time Triton and torch on the device, on one group of `rows` rows that share `keys` keys.

    The pages are consecutive, which is torch's best case, and the metadata is made beforehand, as
    in a step. `seconds` runs a call as often as it likes and returns the time of one.
    """
    from kernels.triton_attention import prefix_attention  # not where there is no Triton

    pages = -(-keys // PAGE_SIZE)
    spans = DeviceSpans.of(Spans.build([(0, rows, [(range(pages), keys)], False)]), shape, device)
    cache_shape = (pages * PAGE_SIZE, shape.kv_heads, shape.head_dim)
    caches = [torch.randn(cache_shape, dtype=shape.dtype, device=device) for _ in range(2)]
    q = torch.randn((rows, shape.heads, shape.head_dim), dtype=shape.dtype, device=device)
    out = torch.empty((1, *q.shape), dtype=torch.float32, device=device)
    lse = torch.empty((1, *q.shape[:2]), dtype=torch.float32, device=device)

    def timed(kernel: PrefixKernel) -> float:
        scale = shape.head_dim**-0.5
        return seconds(lambda: kernel(q, caches[0], caches[1], spans, scale, out, lse))

    triton_s = timed(prefix_attention)
    if not _takes(q):
        return PrefixChoice(prefix_attention, triton_s, None)
    torch_s = timed(prefix_attention_torch)
    faster = prefix_attention if triton_s <= torch_s else prefix_attention_torch
    return PrefixChoice(faster, triton_s, torch_s)

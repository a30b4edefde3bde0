"""How long the engine takes for what a restore consists of, with the model's own weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.model.decoder import Decoder
from engine.model.weights import Weights
from engine.profile.one_sequence import CausalAttention, SequenceRows
from engine.profile.record import SLICE_TOKENS, ComputeCosts, undisturbed
from engine.restoration.stripes import put_kv
from kernels.coding import decode_hidden, decode_kv, encode_hidden, encode_kv
from kernels.linear import PackedLinear

ROWS = (64, 256, SLICE_TOKENS)
PAST = 1536  # tokens before a slice, where attention to them is measured
CACHE_BYTES = 64 << 20  # more than the caches hold
GEMM = (512, 2048, 4096)  # rows, in, out
COPY_BYTES = 256 << 20  # to a device


def measure_compute(weights: Weights, budget_s: float = 1.0) -> ComputeCosts:
    """Time layers, projections and copies; the least of the runs that fit in a share each.

    Every layer in turn, so that their weights come from memory as in a restore, into one layer's
    cache. About `budget_s` seconds for small models; at least one run of each.
    """
    config = weights.config
    cache = KVCache(1, (PAST + SLICE_TOKENS) // PAGE_SIZE, *_heads(weights), weights.dtype)
    cache.k, cache.v = cache.k * config.num_layers, cache.v * config.num_layers
    decoder = Decoder(weights, cache)
    share_s = budget_s / 13
    began = (time.thread_time(), time.perf_counter())
    layer_s, hidden_s = [], []
    for count in ROWS:
        rows = _rows(weights, 0, count)
        layers = partial(decoder.leading, rows, _attention(weights, rows), config.num_layers)
        layer_s.append(_least(layers, share_s))
        hidden_s.append(_least(partial(_projections, decoder, rows), share_s))
    pair_s = _pair_seconds(weights, cache, share_s)
    kv_bytes = 2 * math.prod(_heads(weights)) * weights.dtype.itemsize
    copy_rate = _copy_rate(weights, share_s)
    rows_, inner, outer = GEMM
    return ComputeCosts(
        rows=ROWS,
        layer_s=_plausible(layer_s),
        hidden_s=_plausible(hidden_s),
        kv_s=tuple(count * kv_bytes / copy_rate for count in ROWS),
        pair_s=pair_s,
        gemm_flops_per_s=2.0 * rows_ * inner * outer / _gemm_seconds(weights.dtype, share_s),
        pair_flops_per_s=4.0 * config.num_heads * config.head_dim / pair_s,
        copy_bytes_per_s=copy_rate,
        host_to_device_bytes_per_s=_device_rate(),
        code_s=_code_seconds(weights, share_s),
        undisturbed=undisturbed(began),
    )


def _plausible(seconds: list[float]) -> tuple[float, ...]:
    """Seconds by ROWS, of which none is dearer a row than fewer rows are: that was a disturbance.

    A tenth is allowed for attention within the slice.
    """
    kept = seconds[:1]
    for i in range(1, len(ROWS)):
        kept.append(min(seconds[i], 1.1 * kept[-1] * ROWS[i] / ROWS[i - 1]))
    return tuple(kept)


def _projections(decoder: Decoder, rows: SequenceRows) -> Iterator[None]:
    config = decoder.weights.config
    hidden = torch.randn(len(rows.token_ids), config.hidden_size).to(decoder.weights.dtype)
    for layer in range(config.num_layers):
        decoder.restore(layer, hidden, rows.positions, rows.slots)
        yield


def _rows(weights: Weights, past: int, count: int) -> SequenceRows:
    return SequenceRows.of(torch.arange(count) % weights.config.vocab_size, past)


def _attention(weights: Weights, rows: SequenceRows) -> CausalAttention:
    return CausalAttention(weights.config.num_heads, weights.config.head_dim, rows)


def _heads(weights: Weights) -> tuple[int, int]:
    return weights.config.num_kv_heads, weights.config.head_dim


def _least(runs: Callable[[], Iterator[object]], budget_s: float) -> float:
    """Seconds of a run's fastest piece: the least of all pieces of runs one after another.

    Until the budget is spent and four pieces were run, of which the first is not counted; two have
    to do where they take thrice the budget.
    """
    best = math.inf
    pieces = 0
    deadline = time.perf_counter() + budget_s
    while True:
        began = time.perf_counter()
        for _ in runs():
            ended = time.perf_counter()
            best = min(best, ended - began) if pieces else math.inf
            pieces += 1
            enough = 4 if ended < deadline + 2 * budget_s else 2
            if pieces >= enough and ended > deadline:
                return best
            began = time.perf_counter()


def _pair_seconds(weights: Weights, cache: KVCache, budget_s: float) -> float:
    """What attention to one earlier key costs a query: with a past, less without."""
    q = torch.randn(SLICE_TOKENS, weights.config.num_heads, weights.config.head_dim)
    q = q.to(weights.dtype)
    result = torch.empty_like(q)

    def runs(attention: CausalAttention) -> Iterator[None]:
        attention(q, cache.k[0], cache.v[0], result)
        yield

    seconds = []
    for past in (0, PAST):
        rows = _rows(weights, past, SLICE_TOKENS)
        seconds.append(_least(partial(runs, _attention(weights, rows)), budget_s / 2))
    return max(seconds[1] - seconds[0], 1e-12) / (SLICE_TOKENS * PAST)


def _copy_rate(weights: Weights, budget_s: float) -> float:
    """Bytes of K/V a second from read buffers to pages, a stripe at a time."""
    layers = min(weights.config.num_layers, 8)
    page = KVCache.bytes_per_page(layers, *_heads(weights), weights.dtype)
    cache = KVCache(layers, max(2, CACHE_BYTES // page), *_heads(weights), weights.dtype)
    pages = cache.kv.shape[2] // PAGE_SIZE
    payload = torch.ones(pages, page, dtype=torch.uint8)
    cache.kv.fill_(1)
    every = range(layers)

    def run() -> Iterator[None]:
        for number in range(pages):
            where = slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)
            put_kv(cache.kv, every, where, payload[number], PAGE_SIZE, "")
            yield

    return page / _least(run, budget_s)


def _code_seconds(weights: Weights, budget_s: float) -> dict[str, float]:
    """Seconds a number of coded hidden states and K/V, a slice at a time from more than caches."""
    width = weights.config.hidden_size
    hidden = torch.randn(1, SLICE_TOKENS, width).to(weights.dtype)
    total, out = torch.zeros(hidden.shape[1:]), torch.empty_like(hidden[0])
    seconds: dict[str, float] = {}
    for bits in (8, 6):
        chunk = encode_hidden(hidden, bits)
        chunks = chunk.expand(max(2, CACHE_BYTES // chunk.nbytes), -1).contiguous()

        def hidden_run(chunks: Tensor = chunks, bits: int = bits) -> Iterator[None]:
            for chunk in chunks:
                decode_hidden(chunk, SLICE_TOKENS, bits, total, out)
                yield

        seconds[f"hidden{bits}"] = _least(hidden_run, budget_s) / hidden.numel()
    kv = torch.randn(1, 2, PAGE_SIZE, *_heads(weights)).to(weights.dtype)
    chunk = encode_kv(kv, 0, PAGE_SIZE)
    layers = min(weights.config.num_layers, 8)
    stripes = chunk.expand(max(2, CACHE_BYTES // (layers * chunk.nbytes)), layers, -1).contiguous()
    pages = kv.expand(layers, *kv.shape[1:]).contiguous()

    def kv_run() -> Iterator[None]:
        for stripe in stripes:
            decode_kv(stripe, PAGE_SIZE, pages, slice(0, PAGE_SIZE))
            yield

    seconds["kv8"] = _least(kv_run, budget_s) / pages.numel()
    return seconds


def _gemm_seconds(dtype: torch.dtype, budget_s: float) -> float:
    rows, inner, outer = GEMM
    count = max(2, CACHE_BYTES // (inner * outer * dtype.itemsize))
    weights = [PackedLinear(torch.ones(outer, inner, dtype=dtype)) for _ in range(count)]
    x = torch.ones(rows, inner, dtype=dtype)

    def run() -> Iterator[None]:
        for weight in weights:
            weight(x)
            yield

    return _least(run, budget_s)


def _device_rate() -> float | None:
    """Bytes a second from pinned host memory to the first CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    best = math.inf
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return COPY_BYTES / best

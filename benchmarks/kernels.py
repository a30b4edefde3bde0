"""The attention kernels alone, against what the machine can do: bytes read, or flops computed.

Each row's keys lie in pages spread over a cache larger than the processor's, and successive calls
read other pages. `floor_share`: least seconds (K and V read once at the run's memory bandwidth, or
the products at its packed-GEMM peak, whichever is more) over the median; softmax and LSE included.
`decode` reads unshared keys, one row a sequence; `prefix` shares them among the batch; `prefill`
is causal, `batch` rows of one sequence after `keys - batch` older ones; `merge` joins three states.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import machine
from benchmarks.machine import Peak
from benchmarks.report import Options, Row, progress, run
from engine.devices import resolve_dtype
from kernels.attention import decode_attention, merge_states, prefill_attention, prefix_attention
from kernels.spans import PAGE_SIZE, Spans
from kernels.threading import configure_torch

CACHE_BYTES = 384 << 20  # of K and V together: no cache of a processor holds it
MERGED_STATES = 3


@dataclass(frozen=True)
class Case:
    """One row: a kernel and its sizes."""

    kernel: str
    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Of both products; merging does none that count."""
        if self.kernel == "merge":
            return 0.0
        pairs = float(self.batch * self.keys)
        if self.kernel == "prefill":
            pairs -= self.batch * (self.batch - 1) / 2
        return 4.0 * pairs * self.heads * self.head_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        """K and V read; states read and the result written for a merge."""
        if self.kernel == "merge":
            numbers = self.batch * self.heads * self.head_dim
            return numbers * (4 * MERGED_STATES + dtype.itemsize)
        reads = self.batch if self.kernel == "decode" else 1
        return 2 * reads * self.keys * self.kv_heads * self.head_dim * dtype.itemsize


EMBEDDED_SHAPE, MHA_SHAPE = (9, 3, 64), (32, 32, 64)  # SmolLM2-135M, SmolLM2-1.7B
LLAMA_SHAPE, WIDE_GROUP_SHAPE = (32, 8, 128), (16, 2, 64)  # Llama-3-8B; group 8


def cases(quick: bool) -> list[Case]:
    """What is measured."""
    found: list[Case] = []
    shapes = [EMBEDDED_SHAPE, MHA_SHAPE, LLAMA_SHAPE, WIDE_GROUP_SHAPE]
    for heads in [EMBEDDED_SHAPE] if quick else shapes:
        for batch in (1, 32) if quick else (1, 8, 32):
            for keys in (2048,) if quick else (512, 2048, 8192):
                found.append(Case("decode", batch, keys, *heads))
    for heads in shapes[:2] if quick else shapes:
        for batch in (32,) if quick else (2, 8, 32, 128):
            found.append(Case("prefix", batch, 2048, *heads))
    for heads in shapes[:1] if quick else shapes:
        found.append(Case("prefill", 512, 1024, *heads))
        found.append(Case("merge", 32, 0, *heads))
    return found


class _Cache:
    """Pages of K and V for one geometry, handed out in turn so that none is read again soon."""

    def __init__(self, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.num_pages = CACHE_BYTES // (2 * kv_heads * dim * dtype.itemsize * PAGE_SIZE)
        shape = (self.num_pages * PAGE_SIZE, kv_heads, dim)
        self.k, self.v = (torch.empty(shape, dtype=dtype).normal_() for _ in range(2))
        self._order = list(range(self.num_pages))
        random.Random(0).shuffle(self._order)
        self._next = 0

    def pages(self, tokens: int) -> list[int]:
        count = -(-tokens // PAGE_SIZE)
        taken = [self._order[(self._next + i) % self.num_pages] for i in range(count)]
        self._next = (self._next + count) % self.num_pages
        return taken


def _actions(case: Case, cache: _Cache, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Calls of one kernel on different data, together more than any cache holds."""
    rows, heads, dim = case.batch, case.heads, case.head_dim
    states = MERGED_STATES if case.kernel == "merge" else 1
    count = min(256, max(2, CACHE_BYTES // 2 // case.num_bytes(dtype)))
    scale = dim**-0.5
    actions: list[Callable[[], None]] = []
    for _ in range(count):
        q = torch.randn(rows, heads, dim).to(dtype)
        out, lse = torch.randn(states, rows, heads, dim), torch.randn(states, rows, heads)
        if case.kernel == "merge":
            actions.append(partial(merge_states, out, lse, q))
            continue
        if case.kernel == "decode":
            kernel = decode_attention
            spans = Spans.build(
                [(i, i + 1, [(cache.pages(case.keys), case.keys)], False) for i in range(rows)]
            )
        else:
            causal = case.kernel == "prefill"
            kernel = prefill_attention if causal else prefix_attention
            spans = Spans.build([(0, rows, [(cache.pages(case.keys), case.keys)], causal)])
        actions.append(partial(kernel, q, cache.k, cache.v, spans, scale, out, lse))
    return actions


def _seconds(actions: list[Callable[[], None]], budget_s: float) -> float:
    """Median seconds of a call, after one round without the clock."""
    for action in actions:
        action()
    times: list[float] = []
    ends = time.perf_counter() + budget_s
    while time.perf_counter() < ends or len(times) < 5:
        for action in actions:
            began = time.perf_counter()
            action()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(options: Options) -> Row:
    """Run it; returns the result."""
    configure_torch()
    dtype = resolve_dtype(options.dtype)
    peak = machine.measure_peak(dtype, quick=options.quick)
    found = cases(options.quick)
    timed: dict[Case, float] = {}
    shapes = list(dict.fromkeys((case.kv_heads, case.head_dim) for case in found))
    for shape in shapes:
        cache = _Cache(*shape, dtype)
        for case in found:
            if (case.kv_heads, case.head_dim) == shape:
                progress(f"{case.kernel}: {case.batch} rows, {case.keys} keys, {case.heads} heads")
                timed[case] = _seconds(_actions(case, cache, dtype), 0.3 if options.quick else 1.0)
        peak = peak.better(machine.measure_peak(dtype, quick=options.quick))
    return {
        "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
        "machine": machine.describe(),
        "memory_gb_s": round(peak.bytes_per_s / 1e9, 1),
        "gemm_gflop_s": round(peak.flops_per_s / 1e9, 1),
        "rows": [_row(case, timed[case], dtype, peak) for case in found],
    }


def _row(case: Case, seconds: float, dtype: torch.dtype, peak: Peak) -> Row:
    num_bytes = case.num_bytes(dtype)
    return {
        "kernel": case.kernel,
        "batch": case.batch,
        "keys": case.keys,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "ms": round(seconds * 1e3, 4),
        "gflops": round(case.flops / seconds / 1e9, 1),
        "gbps": round(num_bytes / seconds / 1e9, 1),
        "floor_share": round(peak.floor_s(num_bytes, case.flops) / seconds, 3),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return run("kernels", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

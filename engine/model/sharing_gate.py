"""Whether a node of the prefix tree is read once for all its rows, or by each row for itself.

Both ways are exact; which is faster depends on the machine, the heads and the dtype, so it is
measured with the kernels that the engine runs. One read for all pays for itself from some number
of rows and tokens on, and costs an attention state and its merge below that.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import torch
from numpy.typing import NDArray

from engine.profile.record import AttentionCosts, undisturbed
from kernels.attention import decode_attention, merge_states
from kernels.spans import PAGE_SIZE, Segment, Spans

MARGIN = 0.95  # a predicted gain of less than 5 % is noise
ROWS = (2, 4, 8, 16, 32, 64)
TOKENS = (64, 256, 1024, 4096)
SUFFIX = 64  # private tokens of each row while measuring
CACHE_BYTES = 96 << 20  # of the keys and values that are gone through: three times a large L3
MIN_SWEEPS = 3
CLEAR = 0.6  # cost of sharing over not sharing below which more rows are not measured


class SharingGate:
    """Decides for one model on one machine. Immutable."""

    def __init__(self, costs: AttentionCosts) -> None:
        """Raises ValueError when the table's sizes do not fit its axes."""
        ratio = np.array(costs.shared_s) / np.array(costs.own_s)
        if ratio.shape != (len(costs.rows), len(costs.tokens)):
            raise ValueError(f"a table of {ratio.shape} for {costs.rows} and {costs.tokens}")
        self._ratio = _falling(_falling(np.log(ratio)).T).T
        self._rows = np.log2(costs.rows)
        self._tokens = np.log2(costs.tokens)

    def shares(self, num_tokens: int, num_rows: int) -> bool:
        """Whether `num_rows` decode rows should share the read of a node of `num_tokens` keys.

        Never with fewer rows or tokens than were measured; the gain does not fall as either grows.
        """
        return self.cost_ratio(num_tokens, num_rows) < MARGIN

    def cost_ratio(self, num_tokens: int, num_rows: int) -> float:
        """Predicted attention time of sharing over not sharing; inf outside what was measured."""
        if num_rows < 2 or num_tokens < 1:
            return math.inf
        rows, tokens = math.log2(num_rows), math.log2(num_tokens)
        if rows < self._rows[0] or tokens < self._tokens[0]:
            return math.inf
        by_tokens = [np.interp(tokens, self._tokens, line) for line in self._ratio]
        return math.exp(np.interp(rows, self._rows, by_tokens))


def _falling(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Midway between the tightest columns that never rise, above and below the measured ones."""
    below = np.minimum.accumulate(table, axis=0)
    above = np.maximum.accumulate(table[::-1], axis=0)[::-1]
    middle: NDArray[np.float64] = (below + above) / 2
    return middle


def measure_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, budget_s: float = 1.2
) -> AttentionCosts:
    """Time both ways on this machine, alternating, the least of several runs each.

    Each run reads other pages, so that they come from memory as they do in a step, where the
    weights of a layer go through the caches in between. Where sharing is clearly ahead, more rows
    are taken to cost in proportion and are not measured. About `budget_s` seconds.
    """
    bench = _Bench(num_heads, num_kv_heads, head_dim, dtype)
    shared, own = (np.full((len(ROWS), len(TOKENS)), np.inf) for _ in range(2))
    began = (time.thread_time(), time.perf_counter())
    deadline = time.perf_counter() + budget_s
    # sweeps over all cells, so that a disturbance does not meet all the runs of one
    for sweep in itertools.count():
        if sweep >= MIN_SWEEPS and time.perf_counter() >= deadline:
            break
        for j, i in itertools.product(range(len(TOKENS)), range(len(ROWS))):
            if i == 0 or shared[i - 1, j] > CLEAR * own[i - 1, j]:
                both = bench.run(ROWS[i], TOKENS[j], sweep % 2 == 0)
                shared[i, j], own[i, j] = min(shared[i, j], both[0]), min(own[i, j], both[1])
    for i in range(1, len(ROWS)):
        clear = shared[i - 1] <= CLEAR * own[i - 1]
        scale = ROWS[i] / ROWS[i - 1]
        for table in (shared, own):
            table[i] = np.where(clear, scale * table[i - 1], table[i])
    return AttentionCosts(
        rows=ROWS,
        tokens=TOKENS,
        shared_s=_tuples(shared),
        own_s=_tuples(own),
        undisturbed=undisturbed(began),
    )


def _tuples(table: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(line) for line in table.tolist())


class _Bench:
    """Owns the caches and results that the runs use."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        page_bytes = 2 * PAGE_SIZE * num_kv_heads * head_dim * dtype.itemsize
        largest = (TOKENS[-1] + ROWS[-1] * SUFFIX) // PAGE_SIZE
        self.num_pages = max(CACHE_BYTES // page_bytes, 2 * largest)
        shape = (self.num_pages * PAGE_SIZE, num_kv_heads, head_dim)
        # zeros that were never written would be one page of memory
        self.k = torch.ones(shape, dtype=dtype)
        self.v = torch.ones(shape, dtype=dtype)
        self.q = torch.ones((ROWS[-1], num_heads, head_dim), dtype=dtype)
        self.result = torch.empty_like(self.q)
        self.scale = head_dim**-0.5
        self._next_page = 0
        self.out = torch.empty((2 * ROWS[-1], num_heads, head_dim))
        self.lse = torch.empty((2 * ROWS[-1], num_heads))

    def run(self, rows: int, tokens: int, shared_first: bool) -> tuple[float, float]:
        """Seconds of a shared and of an own read, each from other pages."""
        seconds = [0.0, 0.0]
        for shared in (True, False) if shared_first else (False, True):
            node, own = self._segments(tokens, rows)
            if shared:
                alone = Spans.build((row, row + 1, [own[row]], False) for row in range(rows))
                spans = Spans.join([alone, Spans.groups([[(0, rows, *node)]], rows)])
            else:
                spans = Spans.build((row, row + 1, [node, own[row]], False) for row in range(rows))
            seconds[0 if shared else 1] = self._time(rows, spans, 2 if shared else 1)
        return seconds[0], seconds[1]

    def _segments(self, tokens: int, rows: int) -> tuple[Segment, list[Segment]]:
        """A node, and each row's suffix: the next pages in the cache, round and round."""
        node, each = tokens // PAGE_SIZE, SUFFIX // PAGE_SIZE
        need = node + rows * each
        first = self._next_page if self._next_page + need <= self.num_pages else 0
        self._next_page = first + need
        pages = list(range(first, first + need))
        own = [pages[node + r * each : node + (r + 1) * each] for r in range(rows)]
        return (pages[:node], tokens), [(ids, SUFFIX) for ids in own]

    def _time(self, rows: int, spans: Spans, states: int) -> float:
        q, result = self.q[:rows], self.result[:rows]
        out = self.out[: states * rows].view(states, *q.shape)
        lse = self.lse[: states * rows].view(states, *q.shape[:2])
        began = time.perf_counter()
        decode_attention(q, self.k, self.v, spans, self.scale, out, lse)
        merge_states(out, lse, result)
        return time.perf_counter() - began

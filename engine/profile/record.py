"""The measured figures, as they are kept on disk. Torch-free; seconds, bytes, tokens."""

from __future__ import annotations

import time
from bisect import bisect_right

import msgspec

SLICE_TOKENS = 512  # a restore's compute goes over so many tokens at once


def undisturbed(began: tuple[float, float]) -> float:
    """Share of the time since `began` (thread time, monotonic clock) that this thread ran.

    Kernels keep it busy, so what is missing was another program's.
    """
    return (time.thread_time() - began[0]) / (time.perf_counter() - began[1])


class AttentionCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's attention of a decode step: a node read once for all rows, or by each row.

    `shared_s[i][j]` and `own_s[i][j]`: seconds with rows[i] rows over a node of tokens[j] keys and
    a short suffix of each row; the shared read with its merge of states included.
    """

    rows: tuple[int, ...]  # ascending
    tokens: tuple[int, ...]  # ascending
    shared_s: tuple[tuple[float, ...], ...]
    own_s: tuple[tuple[float, ...], ...]
    undisturbed: float = 1.0  # share of the measuring time that other programs left


class DiskRead(msgspec.Struct, frozen=True, kw_only=True):
    """Cold reads as the chunk store makes them: its readers, its requests, its checksums."""

    bytes_per_s: float
    first_s: float  # from asking to the first stripes that come in
    first_bytes: int  # which are as much as this

    @property
    def latency_s(self) -> float:
        """What a restore waits for before bytes flow."""
        return max(0.0, self.first_s - self.first_bytes / self.bytes_per_s)


class ComputeCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer costs the engine, over a slice of `rows[i]` tokens; ascending.

    `layer_s` is a full layer with attention within the slice only; every further pair of a query
    and a key before the slice adds `pair_s`.
    """

    rows: tuple[int, ...]
    layer_s: tuple[float, ...]
    hidden_s: tuple[float, ...]  # norm, K/V projection, RoPE, scatter
    kv_s: tuple[float, ...]  # stored K/V copied to their pages
    pair_s: float  # all heads of a layer together
    gemm_flops_per_s: float  # a packed GEMM whose weights no cache holds
    pair_flops_per_s: float  # attention over keys before the slice
    copy_bytes_per_s: float  # K/V from a read buffer to their pages
    host_to_device_bytes_per_s: float | None = None  # None: there is no device but the CPU
    # seconds a number from its code in a read buffer: hidden8, hidden6 (on top of hidden_s) and
    # kv8 (in place of kv_s); see kernels.coding
    code_s: dict[str, float] = {}
    undisturbed: float = 1.0  # share of the measuring time that other programs left

    def layer(self, num_tokens: int, past: int) -> float:
        """Seconds of one full layer over tokens behind `past` others, slice after slice."""
        total = 0.0
        for start in range(0, num_tokens, SLICE_TOKENS):
            count = min(SLICE_TOKENS, num_tokens - start)
            total += self._at(self.layer_s, count) + self.pair_s * count * (past + start)
        return total

    def hidden(self, num_tokens: int) -> float:
        """Seconds to rebuild one layer's K/V from its hidden states."""
        return self._over(self.hidden_s, num_tokens)

    def kv(self, num_tokens: int) -> float:
        """Seconds to put one layer's stored K/V in their pages."""
        return self._over(self.kv_s, num_tokens)

    def _over(self, seconds: tuple[float, ...], num_tokens: int) -> float:
        whole, rest = divmod(num_tokens, SLICE_TOKENS)
        return whole * self._at(seconds, SLICE_TOKENS) + (self._at(seconds, rest) if rest else 0.0)

    def _at(self, seconds: tuple[float, ...], count: int) -> float:
        """Between measured sizes in proportion; below the first, half of it at least."""
        rows = self.rows
        if count <= rows[0]:
            return seconds[0] * max(0.5, count / rows[0])
        i = min(bisect_right(rows, count), len(rows) - 1)
        share = (count - rows[i - 1]) / (rows[i] - rows[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

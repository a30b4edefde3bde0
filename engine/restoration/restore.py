"""Loading: chunks read ahead by the store's readers become K/V in the pages of a sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.memory.sequence import Sequence
from engine.restoration.checkpoint import Recorder
from engine.restoration.chunk_store import ChunkStore, LayerChunk, LoadedStripe, StripeRef

Project = Callable[[int, Tensor, Tensor, Tensor], None]

READ_AHEAD_BYTES = 32 << 20  # of one restore
STRIPES_PER_SLICE = 8  # projected together: 512 rows fill the GEMM
WAIT_S = 0.002  # for the next stripe when there is nothing else to do


def put_kv(kv: Tensor, layers: range, slots: slice, payload: Tensor, num_tokens: int) -> None:
    """Copy the stored K/V of some adjacent layers to the slots of a stripe's leading tokens.

    kv as of KVCache, written; payload uint8 [bytes], a chunk of `num_tokens` rows per layer one
    after another.
    """
    rows = payload.view(kv.dtype).view(len(layers), 2, num_tokens, *kv.shape[3:])
    kv[layers.start : layers.stop, :, slots] = rows[:, :, : slots.stop - slots.start]


def kv_runs(chunks: Seq[LayerChunk]) -> list[list[LayerChunk]]:
    """The K/V chunks of a stripe, grouped into runs of layers whose bytes are adjacent."""
    runs: list[list[LayerChunk]] = []
    for chunk in chunks:
        if chunk.method != "kv":
            continue
        last = runs[-1][-1] if runs else None
        if last is not None and (chunk.layer, chunk.offset) == (
            last.layer + 1,
            last.offset + last.length,
        ):
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


def find_stripes(
    store: ChunkStore, seq: Sequence, fingerprint: bytes, start: int, end: int
) -> list[StripeRef]:
    """Stripes on disk that hold tokens of [start, end) of a sequence, in order of position.

    Their own positions count from the owner's first token.
    """
    if start >= end:
        return []
    stripes = range(start // PAGE_SIZE, -(-end // PAGE_SIZE))
    wanted = [
        (
            seq.offset + s * PAGE_SIZE,
            seq.digest_before(s).value,
            seq.array(s * PAGE_SIZE, min(end, (s + 1) * PAGE_SIZE)),
        )
        for s in stripes
    ]
    return [ref for ref in store.find(seq.owner, fingerprint, wanted) if ref is not None]


class RestoreJob:
    """Owns one restore: its read stream, and which tokens came back. Engine thread only.

    Stripes come one after the other (token group by token group): the file is read in one
    sequential sweep, and the sequence's leading tokens are complete first.
    """

    def __init__(
        self,
        store: ChunkStore,
        seq: Sequence,
        refs: Seq[StripeRef],
        cache: KVCache,
        project: Project,
        recorder: Recorder | None,
    ) -> None:
        self.seq = seq
        self.ranges: list[tuple[int, int]] = []  # of tokens restored, half-open, ascending
        self.tokens_total = sum(ref.usable for ref in refs)
        self.tokens_done = 0
        self.bytes_read = 0
        self.rejected: list[str] = []  # why a stripe was not used
        self.methods: set[str] = set()
        self.compute_s = 0.0
        self.finished = False
        self.ended = 0.0
        self.began = time.perf_counter()
        self._cache = cache
        self._project = project
        self._recorder = recorder
        self._stream = store.read(seq.owner, refs, budget_bytes=READ_AHEAD_BYTES)

    @property
    def io_ms(self) -> float:
        return self._stream.io_seconds * 1e3

    @property
    def wall_ms(self) -> float:
        """From the start of the first read to the last page written."""
        return ((self.ended or time.perf_counter()) - self.began) * 1e3

    def advance(self, budget_s: float, wait: bool) -> None:
        """Write what came in to the pages, for about `budget_s` seconds.

        With `wait`, wait a little for the disk when nothing came in.
        """
        deadline = time.perf_counter() + budget_s
        pending: list[LoadedStripe] = []
        while not self.finished:
            pending.extend(self._stream.poll(WAIT_S if wait and not pending else 0.0))
            batch, pending = pending[:STRIPES_PER_SLICE], pending[STRIPES_PER_SLICE:]
            if batch:
                began = time.perf_counter()
                self._write(batch)
                self.compute_s += time.perf_counter() - began
            elif self._stream.finished:
                self.finished = True
                self.ended = time.perf_counter()
            elif not wait:
                break
            if time.perf_counter() >= deadline and not pending:
                break

    def cancel(self) -> None:
        """Stop reading. Pages are not written by readers, so they can be released at once."""
        self._stream.cancel()
        self.finished = True
        self.ended = time.perf_counter()

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that did not come back, ascending."""
        holes: list[tuple[int, int]] = []
        at = start
        for low, high in self.ranges:
            if high <= at:
                continue
            if low > at:
                holes.append((at, min(low, end)))
            at = max(at, high)
            if at >= end:
                break
        if at < end:
            holes.append((at, end))
        return [(a, b) for a, b in holes if a < b]

    def _write(self, stripes: Seq[LoadedStripe]) -> None:
        """Copy or project the chunks of these stripes into their pages."""
        hidden: dict[int, list[tuple[Tensor, LoadedStripe]]] = {}
        good: list[LoadedStripe] = []
        for stripe in stripes:
            if stripe.payload is None:
                self.rejected.append(stripe.error)
                continue
            good.append(stripe)
            self.bytes_read += stripe.ref.payload_bytes
            data, ref = torch.from_numpy(stripe.payload), stripe.ref
            for chunk in ref.chunks:
                if chunk.method == "hidden":
                    raw = data[chunk.offset : chunk.offset + chunk.length]
                    rows = raw.view(self._cache.kv.dtype).view(ref.num_tokens, -1)
                    hidden.setdefault(chunk.layer, []).append((rows, stripe))
            for run in kv_runs(ref.chunks):
                raw = data[run[0].offset : run[-1].offset + run[-1].length]
                layers = range(run[0].layer, run[-1].layer + 1)
                put_kv(self._cache.kv, layers, self._slots(ref), raw, ref.num_tokens)
        if hidden:
            self._project_layers(hidden)
        for stripe in good:
            ref = stripe.ref
            self.methods.update(chunk.method for chunk in ref.chunks)
            self.tokens_done += ref.usable
            start = self._start(ref)
            if self.ranges and self.ranges[-1][1] == start:
                self.ranges[-1] = (self.ranges[-1][0], start + ref.usable)
            else:
                self.ranges.append((start, start + ref.usable))
            self._stream.release(stripe)

    def _start(self, ref: StripeRef) -> int:
        """The stripe's first token in the sequence."""
        return ref.start - self.seq.offset

    def _slots(self, ref: StripeRef) -> slice:
        first = self.seq.page_ids[self._start(ref) // PAGE_SIZE] * PAGE_SIZE
        return slice(first, first + ref.usable)

    def _project_layers(self, hidden: dict[int, list[tuple[Tensor, LoadedStripe]]]) -> None:
        slots: dict[int, Tensor] = {}
        positions: dict[int, Tensor] = {}
        for layer, parts in sorted(hidden.items()):
            for _, stripe in parts:
                ref = stripe.ref
                if ref.start not in slots:
                    where = self._slots(ref)
                    first = self.seq.position + self._start(ref)
                    slots[ref.start] = torch.arange(where.start, where.stop)
                    positions[ref.start] = torch.arange(first, first + ref.usable)
            starts = [stripe.ref.start for _, stripe in parts]
            rows = torch.cat([rows[: stripe.ref.usable] for rows, stripe in parts])
            at = torch.cat([positions[s] for s in starts])
            self._project(layer, rows, at, torch.cat([slots[s] for s in starts]))
            last_rows, last = parts[-1]
            if self._recorder is not None and last.ref.usable < PAGE_SIZE:
                stripe_number = self._start(last.ref) // PAGE_SIZE
                kept = last_rows[: last.ref.usable]
                self._recorder.adopt(self.seq, stripe_number, layer, kept)

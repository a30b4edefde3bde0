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
from engine.restoration.chunk_store import ChunkStore, LoadedStripe, StripeRef

Project = Callable[[int, Tensor, Tensor, Tensor], None]

READ_AHEAD_BYTES = 32 << 20  # of one restore
STRIPES_PER_SLICE = 8  # projected together: 512 rows fill the GEMM
WAIT_S = 0.002  # for the next stripe when there is nothing else to do


def find_stripes(
    store: ChunkStore, seq: Sequence, fingerprint: bytes, start: int, end: int
) -> list[StripeRef]:
    """Stripes on disk that hold tokens of [start, end) of a sequence, in order of position."""
    if start >= end:
        return []
    stripes = range(start // PAGE_SIZE, -(-end // PAGE_SIZE))
    wanted = [
        (
            s * PAGE_SIZE,
            seq.stripe_digest(s),
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
            data = torch.from_numpy(stripe.payload)
            if not self._copy_whole(stripe, data):
                for chunk in stripe.ref.chunks:
                    raw = data[chunk.offset : chunk.offset + chunk.length]
                    rows = raw.view(self._cache.kv.dtype)
                    if chunk.method == "kv":
                        self._copy_layer(stripe.ref, chunk.layer, rows)
                    else:
                        pair = (rows.view(stripe.ref.num_tokens, -1), stripe)
                        hidden.setdefault(chunk.layer, []).append(pair)
        if hidden:
            self._project_layers(hidden)
        for stripe in good:
            ref = stripe.ref
            self.methods.update(chunk.method for chunk in ref.chunks)
            self.tokens_done += ref.usable
            if self.ranges and self.ranges[-1][1] == ref.start:
                self.ranges[-1] = (self.ranges[-1][0], ref.start + ref.usable)
            else:
                self.ranges.append((ref.start, ref.start + ref.usable))
            self._stream.release(stripe)

    def _slots(self, ref: StripeRef) -> slice:
        first = self.seq.page_ids[ref.start // PAGE_SIZE] * PAGE_SIZE
        return slice(first, first + ref.usable)

    def _copy_whole(self, stripe: LoadedStripe, data: Tensor) -> bool:
        """Copy a stripe that has K/V of all layers, in order, at once; False when it is not so."""
        kv, ref = self._cache.kv, stripe.ref
        layers = len(kv)
        if [c.layer for c in ref.chunks] != list(range(layers)):
            return False
        if any(c.method != "kv" for c in ref.chunks):
            return False
        rows = data[: ref.payload_bytes].view(kv.dtype)
        rows = rows.view(layers, 2, ref.num_tokens, *kv.shape[3:])
        kv[:, :, self._slots(ref)] = rows[:, :, : ref.usable]
        return True

    def _copy_layer(self, ref: StripeRef, layer: int, rows: Tensor) -> None:
        kv = self._cache.kv
        pair = rows.view(2, ref.num_tokens, *kv.shape[3:])
        kv[layer, :, self._slots(ref)] = pair[:, : ref.usable]

    def _project_layers(self, hidden: dict[int, list[tuple[Tensor, LoadedStripe]]]) -> None:
        slots: dict[int, Tensor] = {}
        positions: dict[int, Tensor] = {}
        for layer, parts in sorted(hidden.items()):
            for _, stripe in parts:
                ref = stripe.ref
                if ref.start not in slots:
                    where = self._slots(ref)
                    first = self.seq.position + ref.start
                    slots[ref.start] = torch.arange(where.start, where.stop)
                    positions[ref.start] = torch.arange(first, first + ref.usable)
            starts = [stripe.ref.start for _, stripe in parts]
            rows = torch.cat([rows[: stripe.ref.usable] for rows, stripe in parts])
            at = torch.cat([positions[s] for s in starts])
            self._project(layer, rows, at, torch.cat([slots[s] for s in starts]))
            last_rows, last = parts[-1]
            if self._recorder is not None and last.ref.usable < PAGE_SIZE:
                stripe_number = last.ref.start // PAGE_SIZE
                kept = last_rows[: last.ref.usable]
                self._recorder.adopt(self.seq, stripe_number, layer, kept)

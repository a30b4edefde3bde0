"""Loading: chunks read ahead by the store's readers become K/V in the pages of a sequence."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.memory.prefix_tree import PrefixNode
from engine.memory.sequence import Sequence
from engine.restoration.checkpoint import Recorder
from engine.restoration.chunk_store import ChunkStore, LoadedStripe, StripeRef
from engine.restoration.host_tier import HostRef
from engine.restoration.leading import LeadingLayers
from engine.restoration.stripes import (
    HiddenRows,
    absent_layers,
    kv_runs,
    layer_methods,
    put_kv,
    restored_parts,
)
from engine.restoration.timeline import SpanKind, SpanRecord, Timeline

log = logging.getLogger(__name__)

READ_AHEAD_BYTES = 32 << 20  # of one restore
STRIPES_PER_SLICE = 8  # brought in together: 512 rows fill the GEMM
STRIPES_BESIDE_OTHERS = 2  # where whole layers run, so that one of them takes a few milliseconds
WAIT_S = 0.002  # for the next stripe when there is nothing else to do

_Did = tuple[SpanKind, int]  # what a step of a restore was, and of how many layers


@dataclass(frozen=True)
class _Slice:
    """Stripes that are brought in together: one after another, stored in the same way."""

    stripes: list[LoadedStripe]  # none: only layers that are not stored, ahead of the reads
    absent: int  # first layers that are not stored
    start: int  # tokens of the sequence
    end: int


class RestoreJob:
    """Owns one restore: its read stream, and which tokens came back. Engine thread only.

    Stripes come one after the other (token group by token group): the file is read in one
    sequential sweep, the sequence's leading tokens are complete first, and layers that are not
    stored can run as soon as all tokens before a slice have theirs. Tokens whose stripe is lost
    get the K/V of just these layers here, and all of them by the prefill that follows.

    Layers that are not stored wait for nothing that is read, as long as no later tokens have more
    of them than earlier ones (plans never do that): they run ahead of the reads, in slices that
    fill the GEMM however slowly stripes come in.

    The other order, layer by layer, would let the new message's first layers run while the last
    are read. It was measured against this one with 60 MB of the embedded model's K/V, direct reads,
    the file cold: a layer of a stripe is 48 KiB, which reads at 450 MB/s where whole stripes give
    760 (medians of seven alternating passes; 880 and 950 at best), so the reads take half as long
    again, 50 ms, to hide at most the prefill of a short message. On slow disks, where there would
    be time to hide it in, plans recompute layers, and these need all earlier tokens first.
    """

    def __init__(
        self,
        store: ChunkStore,
        seq: Sequence,
        path: Seq[PrefixNode],
        refs: Seq[StripeRef],
        cache: KVCache,
        leading: LeadingLayers,
        recorder: Recorder,
    ) -> None:
        """`path`: the nodes before the sequence, kept up to date by their owner."""
        self.seq = seq
        self.ranges: list[tuple[int, int]] = []  # of tokens restored, half-open, ascending
        self.tokens_total = sum(ref.usable for ref in refs)
        self.tokens_done = 0
        self.bytes_read = 0  # from disk
        self.tokens_from_memory = 0
        self.rejected: list[str] = []  # why a stripe was not used
        self.methods: set[str] = set()
        self.compute_s = 0.0
        self.timeline = Timeline()
        self.finished = False
        self.ended = 0.0
        self.began = time.perf_counter()
        self._path = path
        self._cache = cache
        self._num_layers = len(cache.k)
        self._leading = leading
        self._recorder = recorder
        self._pending: list[LoadedStripe] = []  # came in, in order, not brought in yet
        self._slice: _Slice | None = None
        self._steps: Iterator[_Did] | None = None  # what is left to do for the slice
        self._covered = seq.num_computed  # tokens up to here were brought in, or are a hole
        self._holes: list[tuple[int, int]] = []  # of tokens without K/V of absent layers
        depths = (absent_layers(ref, self._num_layers) or 0 for ref in refs)
        self._deepest = max(depths, default=0)
        self._ahead = deque(_absent_parts(refs, seq.offset + self._covered, self._num_layers))
        self._ahead_to = self._ahead[0][0] if self._ahead else None  # the owner's tokens
        self._rest = _rows_of_partial_stripe(refs[-1]) if refs else 0
        self._last_kept: dict[int, Tensor] = {}  # their hidden states, of layers that ran ahead
        parts = restored_parts(refs, seq.position - seq.offset, self._num_layers)
        self.plan = ", ".join(dict.fromkeys(part.name for part in parts))  # methods of the layers
        self.predicted = recorder.plans.predict(parts)  # None: nothing was measured
        self._stream = store.read(seq.owner, refs, budget_bytes=READ_AHEAD_BYTES)

    @property
    def io_ms(self) -> float:
        return self._stream.io_seconds * 1e3

    @property
    def wall_ms(self) -> float:
        """From the start of the first read to the last page written."""
        return ((self.ended or time.perf_counter()) - self.began) * 1e3

    @property
    def spans(self) -> list[SpanRecord]:
        """When it read and computed, from its start; see `TurnStats.restore_spans`."""
        return self.timeline.spans(self.began)

    def advance(self, budget_s: float, wait: bool) -> None:
        """Bring in what was read, for about `budget_s` seconds: at least a layer, if any is due.

        With `wait`, wait a little for the disk when nothing came in.
        """
        deadline = time.perf_counter() + budget_s
        while not self.finished:
            if self._steps is None and not self._begin_slice(wait):
                break
            if self._steps is not None:
                self._take_steps(deadline)
            if time.perf_counter() >= deadline:
                break

    def _take_steps(self, deadline: float) -> None:
        """Go on with the slice until the deadline: at least one step."""
        part = self._slice
        assert self._steps is not None, "a slice was left before its end"
        assert part is not None, "steps without a slice"
        began = at = time.perf_counter()
        while True:
            did = next(self._steps, None)
            ended = time.perf_counter()
            if did is None:
                self._steps = self._slice = None
                break
            kind, layers = did
            self.timeline.add(kind, at, ended, part.start, part.end - part.start, layers)
            at = ended
            if ended >= deadline:
                break
        self.compute_s += time.perf_counter() - began

    def cancel(self) -> None:
        """Stop reading. Pages are not written by readers, so they can be released at once."""
        for stripe in (*self._pending, *(self._slice.stripes if self._slice else ())):
            self._stream.release(stripe)
        self._pending, self._slice, self._steps = [], None, None
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

    def _finish(self) -> None:
        self.finished = True
        self.ended = time.perf_counter()
        log.debug(
            "%s: %d tokens restored by %s in %.1f ms, %s",
            self.seq.owner,
            self.tokens_done,
            self.plan,
            self.wall_ms,
            f"predicted {self.predicted.total_ms:.1f}" if self.predicted else "nothing predicted",
        )

    # -- slices --------------------------------------------------------------------------------

    def _begin_slice(self, wait: bool) -> bool:
        """Make the next slice the current one, or finish; False when nothing can be done now."""
        idle = not self._pending and not self._ahead
        self._take_in(self._stream.poll(WAIT_S if wait and idle else 0.0))
        while self._pending and self._pending[0].payload is None:
            self.rejected.append(self._pending.pop(0).error)
        if not self._pending and self._stream.finished:
            self._finish()
            return wait
        due = not self._pending or not self._is_ahead(self._pending[0].ref)
        if self._ahead and due and self._leading.ready(self._path):
            self._begin_ahead(wait)
            return True
        if not self._pending:
            return wait
        absent = absent_layers(self._pending[0].ref, self._num_layers)
        if absent is None:
            stripe = self._pending.pop(0)
            self.rejected.append("it does not hold the layers of this model")
            self._stream.release(stripe)
            return True
        if absent > 1 and not self._leading.ready(self._path):
            return False
        limit = STRIPES_PER_SLICE if wait or absent < 2 else STRIPES_BESIDE_OTHERS
        stripes = [self._pending.pop(0)]
        methods = layer_methods(stripes[0].ref)
        while self._pending and len(stripes) < limit:
            ref, last = self._pending[0].ref, stripes[-1].ref
            if (
                self._pending[0].payload is None
                or layer_methods(ref) != methods
                or ref.start != last.start + last.usable
                or (absent > 1 and not self._is_ahead(ref))
            ):
                break
            stripes.append(self._pending.pop(0))
        start = self._start(stripes[0].ref)
        end = self._start(stripes[-1].ref) + stripes[-1].ref.usable
        self._slice = _Slice(stripes, absent, start, end)
        self._steps = self._bring_in(self._slice)
        return True

    def _is_ahead(self, ref: StripeRef) -> bool:
        """Whether all layers of a stripe's tokens that are not stored have run, if they run ahead.

        True for a stripe without such layers.
        """
        ahead = self._ahead_to
        return ahead is None or not self._ahead or ref.start + ref.usable <= ahead

    def _begin_ahead(self, alone: bool) -> None:
        """Run the layers that are not stored over the next tokens."""
        start, end, absent = self._ahead[0]
        limit = (STRIPES_PER_SLICE if alone else STRIPES_BESIDE_OTHERS) * PAGE_SIZE
        stop = min(end, (start + limit) // PAGE_SIZE * PAGE_SIZE)
        offset = self.seq.offset
        self._slice = _Slice([], absent, start - offset, stop - offset)
        self._steps = self._run_ahead(self._slice)

    def _run_ahead(self, part: _Slice) -> Iterator[_Did]:
        self.methods.add("recompute")
        _, end, absent = self._ahead[0]
        stop = self.seq.offset + part.end
        last = stop == end and len(self._ahead) == 1
        yield from self._run_first(part, self._last_kept, self._rest if last else 0)
        self._ahead_to = stop
        if stop == end:
            self._ahead.popleft()
        else:
            self._ahead[0] = (stop, end, absent)

    def _take_in(self, stripes: list[LoadedStripe]) -> None:
        """Put stripes that came in behind those that wait."""
        for stripe in stripes:
            ref = stripe.ref
            if stripe.ended:
                layers = len(ref.chunks)
                self.timeline.add("read", stripe.began, stripe.ended, ref.start, ref.usable, layers)
            self._pending.append(stripe)

    def _bring_in(self, part: _Slice) -> Iterator[_Did]:
        """Write the K/V of a slice's tokens, all layers; pauses after each layer."""
        kept: dict[int, Tensor] = {}  # hidden states of a partial last stripe, by layer
        last = part.stripes[-1].ref
        rest = last.usable if last.usable < PAGE_SIZE else 0
        for stripe in part.stripes:
            assert stripe.payload is not None, "a stripe without payload was put into a slice"
            data = torch.from_numpy(stripe.payload)
            for run in kv_runs(stripe.ref.chunks):
                raw = data[run[0].offset : run[-1].offset + run[-1].length]
                layers = range(run[0].layer, run[-1].layer + 1)
                slots, rows = self._slots(stripe.ref), stripe.ref.num_tokens
                put_kv(self._cache.kv, layers, slots, raw, rows, run[0].coding)
        yield "compute", layer_methods(part.stripes[0].ref).count("kv")
        if part.start > self._covered:
            self._holes.append((self._covered, part.start))
        if part.absent > 1 and self._ahead_to is not None:
            kept.update(self._last_kept)  # not empty if the last stripe is among these
        elif part.absent:
            yield from self._run_absent(part, kept, rest)
        yield from self._project_stored(part, kept, rest)
        self._covered = part.end
        if rest:
            self._recorder.adopt(self.seq, self._start(last) // PAGE_SIZE, kept)
        for stripe in part.stripes:
            self.methods.update(layer_methods(stripe.ref))
            if isinstance(stripe.ref, HostRef):
                self.tokens_from_memory += stripe.ref.usable
            else:
                self.bytes_read += stripe.ref.payload_bytes
            self._stream.release(stripe)
        self.tokens_done += part.end - part.start
        if self.ranges and self.ranges[-1][1] == part.start:
            self.ranges[-1] = (self.ranges[-1][0], part.end)
        else:
            self.ranges.append((part.start, part.end))

    def _run_absent(self, part: _Slice, kept: dict[int, Tensor], rest: int) -> Iterator[_Did]:
        """K/V of the layers that are not stored: all but the last run in full, it is projected."""
        if part.absent > 1:
            self.methods.add("recompute")
            for start, end in self._holes:
                for at in range(start, end, STRIPES_PER_SLICE * PAGE_SIZE):
                    stop = min(end, at + STRIPES_PER_SLICE * PAGE_SIZE)
                    depth = self._deepest - 1
                    for _ in self._leading.run(self.seq, self._path, at, stop, depth):
                        yield "recompute", 0
            self._holes = []
        yield from self._run_first(part, kept, rest)

    def _run_first(self, part: _Slice, kept: dict[int, Tensor], rest: int) -> Iterator[_Did]:
        """All layers but the last that is not stored in full over a slice; it is projected."""
        inputs = self._leading.run(self.seq, self._path, part.start, part.end, part.absent - 1)
        for layer, hidden in enumerate(inputs):
            if rest:
                kept[layer] = hidden[-rest:].clone()
            if layer == part.absent - 1:
                self._leading.decoder.restore(layer, hidden, *self._places(part))
            yield ("recompute", 1) if layer else ("compute", int(part.absent == 1))

    def _project_stored(self, part: _Slice, kept: dict[int, Tensor], rest: int) -> Iterator[_Did]:
        """K/V of the layers whose hidden states are stored."""
        rows = HiddenRows(part.stripes, self._cache.kv.dtype, self._cache.kv.device)
        for i, chunk in enumerate(part.stripes[0].ref.chunks):
            if chunk.method != "hidden":
                continue
            hidden = rows.layer(i)
            if rest:
                kept[chunk.layer] = hidden[-rest:]
            self._leading.decoder.restore(chunk.layer, hidden, *self._places(part))
            yield "compute", 1

    # -- where things are ----------------------------------------------------------------------

    def _start(self, ref: StripeRef) -> int:
        """The stripe's first token in the sequence."""
        return ref.start - self.seq.offset

    def _slots(self, ref: StripeRef) -> slice:
        first = self.seq.page_ids[self._start(ref) // PAGE_SIZE] * PAGE_SIZE
        return slice(first, first + ref.usable)

    def _places(self, part: _Slice) -> tuple[Tensor, Tensor]:
        """Positions and slots of a slice's tokens, int64 [n] each."""
        tokens = torch.arange(part.start, part.end)
        pages = torch.tensor(self.seq.page_ids)[tokens // PAGE_SIZE]
        return self.seq.position + tokens, pages * PAGE_SIZE + tokens % PAGE_SIZE


def _absent_parts(refs: Seq[StripeRef], first: int, num_layers: int) -> list[tuple[int, int, int]]:
    """Tokens [start, end) of the owner with the number of their layers that are not stored.

    Those with two or more, from `first` on, what lies between stripes included. Empty where later
    tokens have more of them than earlier ones: they would need what is yet to be read.
    """
    depths = [absent_layers(ref, num_layers) for ref in refs]
    parts: list[tuple[int, int, int]] = []
    at, least = first, num_layers
    for ref, absent in zip(refs, depths, strict=True):
        if absent is None or absent > least:
            return []
        least = absent
        if absent < 2:
            continue
        end = ref.start + ref.usable
        if parts and parts[-1][2] == absent:
            parts[-1] = (parts[-1][0], end, absent)
        else:
            parts.append((min(at, ref.start), end, absent))
        at = end
    return parts


def _rows_of_partial_stripe(last: StripeRef) -> int:
    return last.usable if last.usable < PAGE_SIZE else 0

"""Saving: hidden states are staged while layers run, full chunks go to the store's writer."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.memory.sequence import Sequence
from engine.restoration.chunk_store import ChunkStore
from engine.restoration.coding import Coding
from engine.restoration.host_copies import HostCopies, Ready
from engine.restoration.plan import Plans
from kernels.coding import encode_hidden, encode_kv

CODING = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a sequence, in the rows from `row` on of this step's batch."""

    seq: Sequence
    start: int
    end: int
    row: int


@dataclass
class _Slot:
    """A staging buffer that collects one stripe; rows [0, rows) are valid."""

    index: int
    rows: int


class Recorder:
    """Owns the staging buffers: the engine thread fills them, the store's writer reads them.

    staging [num_buffers, staged layers, 64, hidden_size]. K/V chunks need no staging while layers
    run: a stripe is exactly a page, from which they are copied once it is full or flushed. The
    engine never waits for the disk: without a free buffer the chunk is dropped and counted.
    """

    def __init__(
        self,
        plans: Plans,
        cache: KVCache,
        store: ChunkStore,
        fingerprint: bytes,
        hidden_size: int,
        context_length: int,
        budget_bytes: int,
        copies: HostCopies | None = None,
        *,
        coding: Coding,
    ) -> None:
        """copies: where the cache is on a CUDA device; the staging buffers are there too then."""
        self.stripes_dropped = 0
        self.plans = plans
        self._cache = cache
        self._store = store
        self._fingerprint = fingerprint
        self._dtype = cache.kv.dtype
        self._coding = coding
        self._budget = budget_bytes
        # every layer that some plan stores as hidden states is staged; a stripe takes its plan's
        hidden_layers = plans.hidden_layers(context_length)
        self._layer_index = {layer: i for i, layer in enumerate(hidden_layers)}
        hidden = len(hidden_layers)
        buffer_bytes = hidden * PAGE_SIZE * hidden_size * self._dtype.itemsize
        count = budget_bytes // 2 // buffer_bytes if hidden else 0
        if hidden and count == 0:
            raise ValueError(f"staging of {budget_bytes} bytes holds no stripe of {buffer_bytes}")
        # and one more, for rows of captured steps that have none
        self._staging = torch.empty(
            (count + 1, hidden, PAGE_SIZE, hidden_size), dtype=self._dtype, device=cache.kv.device
        )
        self._flat = self._staging.view(-1, hidden_size) if hidden else self._staging
        self._free = list(range(count))
        self._slots: dict[Sequence, dict[int, _Slot]] = {}  # by the owner's stripe
        self._idle: OrderedDict[Sequence, None] = OrderedDict()  # resident chats with a buffer
        self._in_flight_bytes = 0
        self._ended: deque[tuple[int | None, int, bool]] = deque()  # from the writer thread
        self._words = _words(self._flat) if copies is None else None
        self._seen: Tensor | None = None  # of `record`, and the same memory as words
        self._seen_words: npt.NDArray[np.int16 | np.int32] = np.empty((0, 0), np.int16)
        self._rows: Tensor | None = None
        self._target: Tensor | None = None
        self._layer_targets: npt.NDArray[np.int64] | None = None  # [layers, rows]
        self._targets: Tensor | None = None  # of all rows of this step, on the device
        self._copies = copies
        # on their way to the host, to be given to the store
        self._copying: deque[tuple[Callable[..., None], list[Tensor], Ready]] = deque()

    # -- while a step runs ---------------------------------------------------------------------

    def begin_step(self, spans: Seq[Span]) -> None:
        """Give every token of this step its row in a staging buffer."""
        self._collect()
        self._hand_over()
        self._targets = None
        if not self._layer_index:
            return
        rows: list[npt.NDArray[np.int64]] = []
        targets: list[npt.NDArray[np.int64]] = []
        layers = len(self._layer_index)
        for span in spans:
            if not span.seq.saves:
                continue
            self._idle.pop(span.seq, None)
            at = span.start
            while at < span.end:
                stripe, offset = divmod(at, PAGE_SIZE)
                count = min(span.end - at, PAGE_SIZE - offset)
                slot = self._slot(span.seq, _stripe(span.seq, stripe), offset)
                if slot is not None:
                    first = slot.index * layers * PAGE_SIZE + offset
                    targets.append(np.arange(first, first + count))
                    row = span.row + at - span.start
                    rows.append(np.arange(row, row + count))
                    slot.rows = offset + count
                at += count
        if rows:
            self._rows = torch.from_numpy(np.concatenate(rows))
            target = np.concatenate(targets)
            self._target = torch.from_numpy(target)
            self._layer_targets = target + PAGE_SIZE * np.arange(layers)[:, None]
        else:
            self._rows = self._target = self._layer_targets = None

    def record(self, layer: int, hidden: Tensor) -> None:
        """Stage the input of a layer.

        hidden [num_tokens, hidden_size], before the layer's norm.
        """
        index = self._layer_index.get(layer)
        if index is None or self._rows is None or self._layer_targets is None:
            return
        if self._words is None:
            if self._targets is None:
                self._targets = self.row_targets(len(hidden)).to(hidden.device)
            self.record_at(layer, hidden, self._targets)
            return
        if hidden is not self._seen:  # the same for all layers of a step
            self._seen, self._seen_words = hidden, _words(hidden)
        source = self._seen_words
        if len(self._rows) < len(source):
            source = source[self._rows.numpy()]
        self._words[self._layer_targets[index]] = source

    def row_targets(self, num_rows: int) -> Tensor:
        """Where `record_at` puts each row of this step, int64 [num_rows]; some go to no buffer."""
        targets = torch.full((num_rows,), self._flat.shape[0] - PAGE_SIZE * len(self._layer_index))
        if self._rows is not None and self._target is not None:
            targets[self._rows] = self._target
        return targets

    def record_at(self, layer: int, hidden: Tensor, targets: Tensor) -> None:
        """Stage the input of a layer by `row_targets`, on the device; may be captured."""
        index = self._layer_index.get(layer)
        if index is not None:
            self._flat.index_copy_(0, targets + index * PAGE_SIZE, hidden)

    def end_step(self, spans: Seq[Span]) -> None:
        """Hand the stripes that became full to the writer."""
        for span in spans:
            for stripe in range(span.start // PAGE_SIZE, span.end // PAGE_SIZE):
                self._submit(span.seq, stripe, PAGE_SIZE)

    # -- at the end of a turn ------------------------------------------------------------------

    def flush(self, seq: Sequence) -> None:
        """Hand the partial last stripe to the writer; its buffer stays for what follows."""
        stripe, rows = divmod(seq.num_computed, PAGE_SIZE)
        if rows and seq.num_computed > seq.num_saved:
            self._submit(seq, stripe, rows)
        self._hand_over()
        if seq in self._slots:
            self._idle[seq] = None

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """The sequence was cut to `num_tokens`; rows staged beyond are void."""
        self._hand_over()
        slots = self._slots.get(seq, {})
        page, rows = divmod(num_tokens, PAGE_SIZE)
        stripe = _stripe(seq, page)
        for number in [s for s in slots if s > stripe or (s == stripe and rows == 0)]:
            self._free.append(slots.pop(number).index)
        if stripe in slots:
            slots[stripe].rows = min(slots[stripe].rows, rows)

    def adopt(self, seq: Sequence, page: int, hidden: Mapping[int, Tensor]) -> None:
        """Take restored rows of a page's partial stripe, so that it can be extended.

        hidden: by layer [n, hidden_size]. Without all layers that are staged the rest of the
        stripe is saved as K/V.
        """
        if not seq.saves or not self._layer_index or not self._layer_index.keys() <= hidden.keys():
            return
        stripe = _stripe(seq, page)
        slot = self._slots.get(seq, {}).get(stripe) or self._slot(seq, stripe, 0)
        if slot is not None:
            for layer, index in self._layer_index.items():
                slot.rows = len(hidden[layer])
                self._staging[slot.index, index, : slot.rows] = hidden[layer]

    def drop(self, seq: Sequence) -> None:
        """The sequence gives up its memory; its buffers return."""
        self._hand_over()
        self._idle.pop(seq, None)
        for slot in self._slots.pop(seq, {}).values():
            self._free.append(slot.index)

    # -- internals -----------------------------------------------------------------------------

    def _slot(self, seq: Sequence, stripe: int, offset: int) -> _Slot | None:
        """The buffer of a stripe whose rows before `offset` are staged; None without one."""
        slots = self._slots.setdefault(seq, {})
        slot = slots.get(stripe)
        if slot is not None and slot.rows >= offset:
            return slot
        if offset > 0 or slot is not None:
            return None  # its first rows were never staged: this stripe cannot be saved
        if not self._free and self._idle:
            oldest, _ = self._idle.popitem(last=False)
            for idle in self._slots.pop(oldest).values():
                self._free.append(idle.index)
        if not self._free:
            return None
        slot = slots[stripe] = _Slot(self._free.pop(), 0)
        return slot

    def _submit(self, seq: Sequence, page: int, rows: int) -> None:
        """Hand the first rows of a page's stripe to the writer, by the plan for a chat so long."""
        start = page * PAGE_SIZE
        if not seq.saves or start + rows <= seq.num_saved:
            return
        plan = self.plans.plan(seq.position - seq.offset, seq.offset + start + rows)
        hidden_layers, kv_layers = plan.hidden_layers, plan.kv_layers
        is_partial = rows < PAGE_SIZE
        staged = self._slots.get(seq, {}).get(_stripe(seq, page))
        if hidden_layers and (staged is None or staged.rows < rows):
            # Its first tokens came by a copy of their K/V, or no buffer was free: their hidden
            # states are gone, but their K/V are here.
            hidden_layers, kv_layers = (), hidden_layers + kv_layers
        chunks: list[tuple[int, str, str]] = []
        buffers: list[Tensor] = []
        in_flight = 0
        if hidden_layers:
            assert staged is not None, "hidden states that were not staged are to be saved"
            taken, copied = self._take_hidden(staged.index, hidden_layers, rows)
            in_flight += copied
            chunks += [(layer, "hidden", self._coding.hidden) for layer in hidden_layers]
            buffers.extend(taken)
        if kv_layers:
            taken = self._take_kv(kv_layers, seq.page_ids[page] * PAGE_SIZE, rows)
            in_flight += taken.nbytes
            chunks += [(layer, "kv", self._coding.kv) for layer in kv_layers]
            buffers.extend(taken)
        slot_index: int | None = None
        if staged is not None and not is_partial:
            slot_index = self._slots[seq].pop(_stripe(seq, page)).index
            if self._coding.bits < 16:  # what is written is a copy
                self._free.append(slot_index)
                slot_index = None
        if self._in_flight_bytes + in_flight > self._budget // 2:
            self.stripes_dropped += 1
            if slot_index is not None:
                self._free.append(slot_index)
            return
        seq.num_saved = start + rows
        if not buffers:
            if slot_index is not None:
                self._free.append(slot_index)
            return
        self._in_flight_bytes += in_flight
        ended = self._ended

        def done(durable: bool) -> None:
            ended.append((slot_index, in_flight, durable))

        append = partial(
            self._store.append,
            owner=seq.owner,
            fingerprint=self._fingerprint,
            start=seq.offset + start,
            parent_digest=seq.digest_before(page).value,
            ids=seq.array(start, start + rows),
            chunks=chunks,
            done=done,
        )
        if self._copies is None:
            append(payload=_bytes(buffers))
        else:
            self._copying.append((append, *self._copies.start(buffers)))

    def _take_hidden(self, slot: int, layers: tuple[int, ...], rows: int) -> tuple[Tensor, int]:
        """A buffer's first rows as they are written, [layers, ...]; and the bytes of a copy.

        Whole stripes are written from the staging buffer itself unless they are coded.
        """
        first = self._layer_index[layers[0]]
        staged = self._staging[slot, first : first + len(layers), :rows]
        if self._coding.bits < 16:
            coded = encode_hidden(staged, self._coding.bits)
            return coded, coded.nbytes
        if rows < PAGE_SIZE:
            staged = staged.clone()  # the rows may change while the writer reads
            return staged, staged.nbytes
        return staged, 0

    def _take_kv(self, layers: tuple[int, ...], slot: int, rows: int) -> Tensor:
        """A copy of the K/V of some adjacent layers at adjacent slots, [layers, ...]."""
        kv = self._cache.kv[layers[0] : layers[-1] + 1]
        if self._coding.bits < 16:
            return encode_kv(kv, slot, rows)
        return kv[:, :, slot : slot + rows].contiguous()

    def _hand_over(self) -> None:
        """Give the store what was copied to the host; that is over by the next step's start."""
        while self._copying:
            append, copies, ready = self._copying.popleft()
            ready.synchronize()
            append(payload=_bytes(copies))

    def _collect(self) -> None:
        """Take back what the writer is done with."""
        while self._ended:
            slot, in_flight, _ = self._ended.popleft()
            self._in_flight_bytes -= in_flight
            if slot is not None:
                self._free.append(slot)


def _bytes(buffers: Seq[Tensor]) -> list[npt.NDArray[np.uint8]]:
    return [buffer.reshape(-1).view(torch.uint8).numpy() for buffer in buffers]


def _words(rows: Tensor) -> npt.NDArray[np.int16 | np.int32]:
    """The same memory as whole numbers: NumPy copies rows in less time than torch, not bf16."""
    return rows.view(torch.int16 if rows.element_size() == 2 else torch.int32).numpy()


def _stripe(seq: Sequence, page: int) -> int:
    """The owner's stripe that a page of a sequence is; it stays when the sequence is split."""
    return seq.offset // PAGE_SIZE + page

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
from kernels.kv import stage_rows

CODING = {torch.bfloat16: "bf16", torch.float32: "fp32"}
# Hidden states of a step are kept in layers, as they come, and moved to the staging buffers
# together: with 32 chats a layer's rows go to 32 places, and 30 calls for that cost 1.2 ms a step.
LOG_BYTES = 4 << 20


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
        self._log = _Log(hidden_size, self._dtype) if hidden and copies is None else None
        self._rows: Tensor | None = None
        self._target: Tensor | None = None  # of the first staged layer
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
            self._target = torch.from_numpy(np.concatenate(targets))
        else:
            self._rows = self._target = None
        if self._log is not None:
            self._log.clear()

    def record(self, layer: int, hidden: Tensor) -> None:
        """Stage the input of a layer.

        hidden [num_tokens, hidden_size], before the layer's norm.
        """
        index = self._layer_index.get(layer)
        if index is None or self._rows is None:
            return
        if self._log is None:
            if self._targets is None:
                self._targets = self.row_targets(len(hidden)).to(hidden.device)
            self.record_at(layer, hidden, self._targets)
            return
        if self._log.full(hidden):
            self._stage()
        if self._log.holds(hidden):
            self._log.add(index, hidden)
        else:
            self._move(index, hidden[None])

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
        self._stage()
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

    def _stage(self) -> None:
        """Move what `record` keeps to the staging buffers."""
        if self._log is not None and self._log.count:
            self._move(self._log.first, self._log.hidden)
            self._log.clear()

    def _move(self, first: int, hidden: Tensor) -> None:
        """Rows of adjacent staged layers from number `first` on, [layers, rows, D]."""
        assert self._rows is not None, "layers are kept without rows"
        assert self._target is not None, "layers are kept without targets"
        stage_rows(hidden, self._rows, self._target, self._flat[first * PAGE_SIZE :], PAGE_SIZE)

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
        buffers: list[Tensor] = []  # [layers, ...] each
        in_flight = 0
        if hidden_layers:
            assert staged is not None, "hidden states that were not staged are to be saved"
            taken, copied = self._take_hidden(staged.index, hidden_layers, rows)
            in_flight += copied
            chunks += [(layer, "hidden", self._coding.hidden) for layer in hidden_layers]
            buffers.append(taken)
        if kv_layers:
            taken = self._take_kv(kv_layers, seq.page_ids[page] * PAGE_SIZE, rows)
            in_flight += taken.nbytes
            chunks += [(layer, "kv", self._coding.kv) for layer in kv_layers]
            buffers.append(taken)
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


class _Log:
    """Owns the hidden states of adjacent staged layers of one step, until they are moved."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self._kept = torch.empty(
            LOG_BYTES // dtype.itemsize // hidden_size, hidden_size, dtype=dtype
        )
        self._words = _words(self._kept)
        self._seen: Tensor | None = None  # and the same memory as words
        self._seen_words: npt.NDArray[np.int16 | np.int32] = np.empty((0, 0), np.int16)
        self.first = 0  # number of the first layer kept
        self.count = 0  # of layers

    @property
    def hidden(self) -> Tensor:
        """[count, rows, hidden_size]"""
        rows = len(self._seen_words)
        return self._kept[: self.count * rows].view(self.count, rows, -1)

    def holds(self, hidden: Tensor) -> bool:
        """Several layers of so many rows."""
        return 2 * len(hidden) <= len(self._kept)

    def full(self, hidden: Tensor) -> bool:
        return (self.count + 1) * len(hidden) > len(self._kept)

    def add(self, number: int, hidden: Tensor) -> None:
        """Keep the layer with this number, the next one after those that are here."""
        if hidden is not self._seen:  # the same for all layers of a step
            self._seen, self._seen_words = hidden, _words(hidden)
        if not self.count:
            self.first = number
        rows = len(self._seen_words)
        self._words[self.count * rows : (self.count + 1) * rows] = self._seen_words
        self.count += 1

    def clear(self) -> None:
        self.count = 0


def _bytes(blocks: Seq[Tensor]) -> list[npt.NDArray[np.uint8]]:
    """The bytes of each layer of each block."""
    layers: list[npt.NDArray[np.uint8]] = []
    for block in blocks:
        layers.extend(block.reshape(len(block), -1).view(torch.uint8).numpy())
    return layers


def _words(rows: Tensor) -> npt.NDArray[np.int16 | np.int32]:
    """The same memory as whole numbers: NumPy copies rows in less time than torch, not bf16."""
    return rows.view(torch.int16 if rows.element_size() == 2 else torch.int32).numpy()


def _stripe(seq: Sequence, page: int) -> int:
    """The owner's stripe that a page of a sequence is; it stays when the sequence is split."""
    return seq.offset // PAGE_SIZE + page

"""Decode steps as captured CUDA graphs: one launch a step instead of a dozen for each layer.

A graph is a recording of addresses and shapes. Everything that differs between steps (tokens,
positions, slots, pages, lengths, which rows share which nodes) therefore lies in buffers that are
filled before each replay; what shapes the launches (rows, levels of shared nodes, room for groups,
nodes that a row reads for itself) is rounded up, and each combination is captured when it first
occurs. Rows that are left over write to a page that nobody reads and attend to nothing.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.memory.page_pool import PAGE_SIZE, pages_for
from engine.model.attention import SPARE_PAGES, StepAttention
from engine.model.decoder import Decoder
from kernels.attention import decode_attention, merge_states, prefix_attention
from kernels.spans import UNMASKED, Spans
from kernels.triton_spans import AttentionShape, DeviceSpans, SpanLimits

MAX_ROWS = 256
MAX_LEVELS = 4  # of shared nodes above a row
MAX_OWN_NODES = 7  # that a row reads for itself
MAX_GRAPHS = 24  # kept; each holds some 50 MB of partial results for a 7B model
MIN_GROUPS = 4

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]  # of a function that uses fixed addresses only


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool. One thread, one stream.

    Graphs of a pool may reuse each other's temporary memory, so that they must not run at once and
    what they give is to be read before another is replayed.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Run the function once, for what is compiled or set up at the first call, and capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            run()
        replay: Replay = graph.replay
        return replay


def replay_seconds(calls: Sequence[Callable[[], None]], times: int = 5) -> float:
    """Median seconds of one of several equal calls on CUDA, which differ in the memory they use.

    All of them are captured as one graph, so that no launch is waited for.
    """

    def run() -> None:
        for call in calls:
            call()

    replay = CudaCapture()(run)
    replay()
    seconds: list[float] = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds) / len(calls)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a captured step is made for; each number is the most that it takes."""

    rows: int
    levels: int
    groups: int  # spans of shared nodes, all levels together
    depth: int  # nodes that a row reads for itself, and its own pages

    @classmethod
    def of(cls, num_rows: int, attention: StepAttention, max_rows: int) -> StepShape | None:
        """The smallest for a step; None when it is beyond what is captured."""
        decode, groups = attention.decode, attention.groups
        if decode is None or attention.prefill is not None or num_rows > max_rows:
            return None
        depth = decode.segments.shape[1]
        if attention.levels > MAX_LEVELS or depth > MAX_OWN_NODES + 1:
            return None
        rows = power_of_two(num_rows)
        spans = 0
        if groups is not None:
            padding = attention.levels if num_rows < rows else 0
            spans = max(MIN_GROUPS, power_of_two(len(groups.rows) + padding))
        return cls(rows, attention.levels, spans, power_of_two(depth))


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def with_empty_rows(spans: Spans, first: int, stop: int, states: range) -> Spans:
    """The spans, and rows [first, stop) that see no key in each of the states; for padding."""
    if first == stop:
        return spans
    rows = np.array([(first, stop, UNMASKED, state) for state in states], np.int64)
    segments = np.zeros((len(rows), *spans.segments.shape[1:]), np.int64)
    return Spans(
        np.concatenate([spans.rows, rows]),
        np.concatenate([spans.segments, segments]),
        spans.pages,
    )


class RowRecorder(Protocol):
    """Takes the inputs of layers, each row to a place of its own; see `Recorder`."""

    def row_targets(self, num_rows: int) -> Tensor: ...
    def record_at(self, layer: int, hidden: Tensor, targets: Tensor) -> None: ...


class DecodeGraphs:
    """Owns the captured steps and the logits that they write. Engine thread only."""

    def __init__(
        self,
        decoder: Decoder,
        max_context: int,
        scratch_page: int,
        capture: Capture,
        *,
        max_rows: int = MAX_ROWS,
        programs: int | None = None,
        recorder: RowRecorder | None = None,
    ) -> None:
        """scratch_page: of the cache, held by nobody; programs: as of `DeviceSpans`."""
        self._recorder = recorder
        self._decoder = decoder
        self._scratch_slot = scratch_page * PAGE_SIZE
        self._capture = capture
        self._max_rows = max_rows
        self._programs = programs
        self._row_pages = pages_for(max_context) + SPARE_PAGES
        config, device = decoder.weights.config, decoder.cache.kv.device
        self._logits = torch.empty(
            (power_of_two(max_rows), config.vocab_size), dtype=torch.float32, device=device
        )
        self._graphs: OrderedDict[StepShape, _Graph] = OrderedDict()  # least recently used first
        self.captured = 0
        self.replayed = 0

    def run(self, batch: Batch, attention: StepAttention) -> Tensor | None:
        """Run a decode step; None when it has to run without a graph.

        batch: on the CPU, as `build_batch` made it. Returns fp32 logits [num_logits, vocab_size],
        valid until the next run.
        """
        shape = StepShape.of(batch.num_tokens, attention, self._max_rows)
        if shape is None or batch.num_decode < batch.num_tokens:
            return None
        graph = self._graphs.get(shape)
        if graph is None:
            if len(self._graphs) == MAX_GRAPHS:
                self._graphs.popitem(last=False)
            graph = self._graphs[shape] = self._make(shape)
            self.captured += 1
        self._graphs.move_to_end(shape)
        if not graph.fill(batch, attention):
            return None
        graph.run()
        self.replayed += 1
        return self._logits[: batch.num_tokens]

    def _make(self, shape: StepShape) -> _Graph:
        return _Graph(
            shape,
            self._decoder,
            self._row_pages,
            self._scratch_slot,
            self._logits[: shape.rows],
            self._capture,
            self._programs,
            self._recorder,
        )


class _Graph:
    """Owns the buffers of one captured step."""

    def __init__(
        self,
        shape: StepShape,
        decoder: Decoder,
        row_pages: int,
        scratch_slot: int,
        logits: Tensor,
        capture: Capture,
        programs: int | None,
        recorder: RowRecorder | None,
    ) -> None:
        self._shape = shape
        self._recorder = recorder
        self._decoder = decoder
        self._logits = logits
        self._capture = capture
        self._replay: Replay | None = None
        self._filled: StepAttention | None = None  # whose groups are in the buffers
        config, cache = decoder.weights.config, decoder.cache
        device, rows = cache.kv.device, shape.rows
        heads, dim = config.num_heads, config.head_dim
        self._scale = dim**-0.5
        cuda = device.type == "cuda"
        # token ids, positions, slots and places in the recorder of each row
        self._staging = torch.zeros((4, rows), dtype=torch.int64, pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None
        self._inputs = torch.zeros((4, rows), dtype=torch.int64, device=device)
        self._padding = scratch_slot + torch.arange(rows) % PAGE_SIZE
        self._batch = Batch(
            segments=(),
            first_rows=(),
            num_decode=rows,
            token_ids=self._inputs[0],
            positions=self._inputs[1],
            slots=self._inputs[2],
            logit_rows=torch.arange(rows, device=device),
            logit_segments=(),
        )
        cache_pages = cache.k[0].shape[0] // PAGE_SIZE
        kernel_shape = AttentionShape(heads, config.num_kv_heads, dim, cache.kv.dtype)
        own = SpanLimits(rows, 1, rows, shape.depth, rows * row_pages + cache_pages)
        self._decode = DeviceSpans(kernel_shape, own, device, programs)
        self._groups: DeviceSpans | None = None
        if shape.levels:
            limits = SpanLimits(rows * shape.levels, rows, shape.groups, 1, cache_pages)
            self._groups = DeviceSpans(kernel_shape, limits, device, programs)
        states = (shape.levels + 1, rows, heads)
        self._out = torch.empty((*states, dim), dtype=torch.float32, device=device)
        self._lse = torch.empty(states, dtype=torch.float32, device=device)

    def fill(self, batch: Batch, attention: StepAttention) -> bool:
        """Put a step into the buffers; False when its pages are more than they hold."""
        shape, used = self._shape, batch.num_tokens
        decode, groups = attention.decode, attention.groups
        assert decode is not None, "a decode step without decode rows"
        if len(decode.pages) > self._decode.pages.shape[0]:
            return False
        if self._groups is not None and groups is not None:
            if len(groups.pages) > self._groups.pages.shape[0]:
                return False
            if attention is not self._filled:
                states = range(1, shape.levels + 1)
                self._groups.fill(with_empty_rows(groups, used, shape.rows, states))
                self._filled = attention
        self._decode.fill(with_empty_rows(decode, used, shape.rows, range(1)))
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has left the staging memory
        self._staging[0, :used] = batch.token_ids
        self._staging[1, :used] = batch.positions
        self._staging[2, :used] = batch.slots
        self._staging[:2, used:] = 0
        self._staging[2, used:] = self._padding[used:]
        if self._recorder is not None:
            self._staging[3] = self._recorder.row_targets(shape.rows)
        self._inputs.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return True

    def run(self) -> None:
        """Run what was filled in; the first time it is captured."""
        if self._replay is None:
            self._replay = self._capture(self._step)
        self._replay()

    def _step(self) -> None:
        record = None if self._recorder is None else self._record
        self._logits.copy_(self._decoder.forward(self._batch, self._attend, record))

    def _record(self, layer: int, hidden: Tensor) -> None:
        assert self._recorder is not None, "hidden states are recorded by nobody"
        self._recorder.record_at(layer, hidden, self._inputs[3])

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, result: Tensor) -> None:
        scale, out, lse = self._scale, self._out, self._lse
        decode_attention(q, k_cache, v_cache, self._decode, scale, out, lse)
        if self._groups is not None:
            prefix_attention(q, k_cache, v_cache, self._groups, scale, out, lse)
        merge_states(out, lse, result)

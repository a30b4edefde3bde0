"""Spans on a CUDA device: the work of every program of the attention kernels, refilled in place.

A block is some rows of one span with their query heads folded in; an item is a block and a run of
its key tiles, for all KV heads. A block whose keys are many is cut into several items, so that all
multiprocessors have work; a join then merges the parts of one of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.spans import PAGE_SIZE, Spans

ITEM_FIELDS = 8  # first row, row stop, base, state, span, first tile, tile stop, first part or -1
JOIN_FIELDS = 5  # row, state, first part, distance between parts, parts
MIN_SPLIT_TILES = 2  # a part shorter than this costs more than it saves
_NO_BASE = 1 << 30  # the base of a span without a mask: beyond every key, and sums fit in 32 bits

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the attention kernels are compiled for; dtype: of the queries and of the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """The most that a `DeviceSpans` holds."""

    rows: int  # in all spans together; a row counts once per state
    span_rows: int  # in one span that has keys
    spans: int
    depth: int  # segments of one span
    pages: int


@dataclass(frozen=True, slots=True)
class _Plan:
    items: Ints  # [I, ITEM_FIELDS]
    joins: Ints  # [J, JOIN_FIELDS]
    parts: int  # rows of split results


def block_rows(span_rows: int, shape: AttentionShape) -> int:
    """Rows of a block, query heads folded in: a power of two from 16 to 128, never below a group.

    What limits it are registers and shared memory: see `triton_attention.launch_options`.
    """
    half_precision = 128 if shape.head_dim <= 128 else 64
    most = 32 if shape.dtype == torch.float32 else half_precision
    size = 16
    while size < max(min(span_rows * shape.group, most), shape.group):
        size *= 2
    return size


def _span_rows(spans: Spans) -> int:
    """Rows of the largest span that has keys."""
    return int((spans.rows[:, 1] - spans.rows[:, 0])[spans.num_keys > 0].max(initial=1))


def _repeat(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [n]: which entry each of sum(counts) copies belongs to, and its number there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _plan(spans: Spans, block_tokens: int, slots: int) -> _Plan:
    """Items of about equal numbers of tiles, longest first; at most slots more than blocks."""
    start, stop, base, state = spans.rows.T
    base = np.minimum(base, _NO_BASE)
    lengths = spans.segments[:, :, 1]
    span, number = _repeat(-(-(stop - start) // block_tokens))
    first = start[span] + number * block_tokens
    last = np.minimum(first + block_tokens, stop[span])
    before = np.cumsum(lengths, axis=1) - lengths
    seen = np.clip((base[span] + last)[:, None] - before[span], 0, lengths[span])
    tiles = (-(-seen // PAGE_SIZE)).sum(axis=1)
    share = max(MIN_SPLIT_TILES, -(-int(tiles.sum()) // slots))
    splits = np.maximum(-(-tiles // share), 1)
    is_split = splits > 1
    block_parts = np.where(is_split, splits * (last - first), 0)
    first_part = np.cumsum(block_parts) - block_parts

    block, split = _repeat(splits)
    low = split * tiles[block] // splits[block]
    high = (split + 1) * tiles[block] // splits[block]
    part = np.where(is_split[block], first_part[block] + split * (last[block] - first[block]), -1)
    table = (first[block], last[block], base[span[block]], state[span[block]])
    items = np.stack([*table, span[block], low, high, part], axis=1)
    items = items[np.argsort(low - high, kind="stable")]

    cut = np.flatnonzero(is_split)
    owner, offset = _repeat((last - first)[cut])
    owner = cut[owner]
    joins = np.stack(
        [
            first[owner] + offset,
            state[span[owner]],
            first_part[owner] + offset,
            (last - first)[owner],
            splits[owner],
        ],
        axis=1,
    )
    return _Plan(items, joins, int(block_parts.sum()))


class DeviceSpans:
    """Owns one step's `Spans` on a device, and the memory of their parts; used by one stream.

    `fill` replaces the spans in place: addresses, shapes and the kernels' grids depend on the
    limits only, so a captured CUDA graph that was recorded with it replays with whatever was
    filled last, other lengths, pages, rows and numbers of spans included. Entries that a filling
    leaves unused are empty: their programs end at once and write nothing. One filling serves all
    layers of a step.
    """

    def __init__(
        self,
        shape: AttentionShape,
        limits: SpanLimits,
        device: torch.device | str,
        programs: int | None = None,
    ) -> None:
        """Empty. programs: how many run at once; None: two for each multiprocessor, on CPU one."""
        self._start(shape, limits.span_rows, device, programs)
        blocks = limits.spans + limits.rows // self._block_tokens
        parts = 2 * self._slots * min(self._block_tokens, limits.span_rows)
        self._allocate(
            limits.spans, limits.depth, limits.pages, blocks + self._slots,
            min(limits.rows, parts), parts,
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        spans: Spans,
        shape: AttentionShape,
        device: torch.device | str,
        programs: int | None = None,
    ) -> DeviceSpans:
        """Exactly these spans, for one step that no graph replays."""
        self = cls.__new__(cls)
        self._start(shape, _span_rows(spans), device, programs)
        plan = _plan(spans, self._block_tokens, self._slots)
        count, depth = spans.segments.shape[:2]
        self._allocate(count, depth, len(spans.pages), len(plan.items), len(plan.joins), plan.parts)
        self._write(spans, plan)
        return self

    def fill(self, spans: Spans) -> None:
        """Replace the spans, before the kernels (or the graph) of a step run on this stream.

        ValueError: more than the limits allow.
        """
        plan = _plan(spans, self._block_tokens, self._slots)
        count, depth = spans.segments.shape[:2]
        for name, size, room in (
            ("rows in a span", _span_rows(spans), self._span_rows),
            ("spans", count, self.segments.shape[0]),
            ("segments of a span", depth, self.depth),
            ("pages", len(spans.pages), self.pages.shape[0]),
            ("blocks of rows", len(plan.items), self.items.shape[0]),
            ("split rows", len(plan.joins), self.joins.shape[0]),
        ):
            if size > room:
                raise ValueError(f"{size} {name}, room for {room}")
        self._write(spans, plan)

    def _start(
        self,
        shape: AttentionShape,
        span_rows: int,
        device: torch.device | str,
        programs: int | None,
    ) -> None:
        self.shape = shape
        self.host = Spans.build([])  # what was filled last
        self.row_stop = self.state_stop = self.page_stop = 0  # beyond what it names
        self.device = torch.device(device)
        self.block_rows = block_rows(span_rows, shape)
        self._span_rows = span_rows
        self._block_tokens = self.block_rows // shape.group
        if programs is None and self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            programs = 2 * properties.multi_processor_count
        self._slots = max(1, (programs or 1) // shape.kv_heads)

    def _allocate(
        self, spans: int, depth: int, pages: int, items: int, joins: int, parts: int
    ) -> None:
        # Pages last: a filling copies no further than it uses.
        sizes = [items * ITEM_FIELDS, joins * JOIN_FIELDS, spans * depth * 2, pages]
        cuda = self.device.type == "cuda"
        self._staging = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=cuda)
        self._on_device = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        self._copied = torch.cuda.Event() if cuda else None
        host = [section.numpy() for section in self._staging.split(sizes)]
        self._host_items = host[0].reshape(items, ITEM_FIELDS)
        self._host_joins = host[1].reshape(joins, JOIN_FIELDS)
        self._host_segments = host[2].reshape(spans, depth, 2)
        self._host_pages = host[3]
        self._fixed_size = sum(sizes[:3])
        device = self._on_device.split(sizes)
        self.depth = depth
        self.items: Tensor = device[0].view(items, ITEM_FIELDS)
        self.joins: Tensor = device[1].view(joins, JOIN_FIELDS)
        self.segments: Tensor = device[2].view(spans, depth, 2)
        self.pages: Tensor = device[3]
        heads, dim = self.shape.heads, self.shape.head_dim
        self.part_out = torch.empty((parts, heads, dim), dtype=torch.float32, device=self.device)
        self.part_lse = torch.empty((parts, heads), dtype=torch.float32, device=self.device)

    def _write(self, spans: Spans, plan: _Plan) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has left the staging memory
        self.host = spans
        self.row_stop = int(spans.rows[:, 1].max(initial=0))
        self.state_stop = int(spans.rows[:, 3].max(initial=-1)) + 1
        self.page_stop = int(spans.pages.max(initial=-1)) + 1
        count, depth = spans.segments.shape[:2]
        for target, source in (
            (self._host_items, plan.items),
            (self._host_joins, plan.joins),
        ):
            target[: len(source)] = source
            target[len(source) :] = 0
        self._host_segments[:] = 0
        self._host_segments[:count, :depth] = spans.segments
        self._host_pages[: len(spans.pages)] = spans.pages
        used = self._fixed_size + len(spans.pages)
        self._on_device[:used].copy_(self._staging[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))

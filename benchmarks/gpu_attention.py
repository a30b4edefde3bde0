"""The attention kernels on a CUDA device against their floor, and against torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu_lab import CACHED_BYTES, Call, Lab, Row
from engine.model.cuda_gate import sharing_seconds
from kernels.prefix_choice import PrefixKernel, prefix_attention_torch
from kernels.spans import PAGE_SIZE, Spans
from kernels.triton_attention import span_attention
from kernels.triton_merge import merge_states
from kernels.triton_spans import AttentionShape, DeviceSpans

MAX_DIFFERENCE = 0.02  # relative, of two bf16 results
HEADS = {"MHA": (32, 32, 128), "GQA": (32, 8, 128)}  # of Llama 2 7B and Llama 3 8B
PREFIXES = ((32, 1024), (32, 16384), (128, 4096), (512, 1024), (512, 16384), (1024, 4096))
SUFFIXES = ((32, 128), (32, 2048), (256, 128), (256, 1024))  # rows, tokens of each
PREFILLS = ((256, 256), (512, 2560))  # rows, keys
SHARERS, NODES = (2, 8, 32), (64, 256, 1024, 4096)
TINY_HEADS = {"GQA": (4, 2, 32)}


class Differ(Exception):
    """Two kernels' results for the same inputs are not the same."""


def attention_rows(lab: Lab) -> Iterator[Row]:
    """A row per kernel and size: milliseconds, share of the floor, torch's milliseconds.

    Raises Differ when the prefix kernel and torch's disagree.
    """
    for name, heads in (HEADS if lab.is_cuda else TINY_HEADS).items():
        for rows, keys in PREFIXES if lab.is_cuda else ((3, 70),):
            pages = range(-(-keys // PAGE_SIZE))
            spans = Spans.build([(0, rows, [(pages, keys)], False)])
            bench = _Bench(lab, heads, rows, keys, spans)
            torch_ms = bench.compared()
            yield bench.row("prefix", name, rows * keys, keys, torch_ms)
        for rows, keys in SUFFIXES if lab.is_cuda else ((3, 70),):
            each = -(-keys // PAGE_SIZE)
            spans = Spans.build(
                (r, r + 1, [(range(r * each, (r + 1) * each), keys)], False) for r in range(rows)
            )
            yield _Bench(lab, heads, rows, rows * each * PAGE_SIZE, spans).row(
                "suffix", name, rows * keys, rows * keys, None
            )
        for rows, keys in PREFILLS if lab.is_cuda else ((5, 70),):
            pages = range(-(-keys // PAGE_SIZE))
            spans = Spans.build([(0, rows, [(pages, keys)], True)])
            pairs = rows * (keys - rows) + rows * (rows + 1) // 2
            yield _Bench(lab, heads, rows, keys, spans).row("prefill", name, pairs, keys, None)
        yield _merge_row(lab, name, heads)


def sharing_rows(lab: Lab) -> list[Row]:
    """What the gate would measure on this device for Llama 2 7B: milliseconds of both ways."""
    num_heads, kv_heads, dim = HEADS["MHA"] if lab.is_cuda else TINY_HEADS["GQA"]
    shape = AttentionShape(num_heads, kv_heads, dim, lab.dtype)
    rows, tokens = (SHARERS, NODES) if lab.is_cuda else ((2,), (64,))
    shared, own = sharing_seconds(shape, lab.device, rows, tokens, lab.seconds, lab.programs)
    return [
        {
            "rows": rows[i],
            "tokens": tokens[j],
            "shared_ms": round(shared[i][j] * 1e3, 4),
            "own_ms": round(own[i][j] * 1e3, 4),
        }
        for i, j in product(range(len(rows)), range(len(tokens)))
    ]


class _Bench:
    """Owns inputs in several places, so that no run finds them in the L2 cache."""

    def __init__(
        self, lab: Lab, heads: tuple[int, int, int], rows: int, keys: int, spans: Spans
    ) -> None:
        num_heads, kv_heads, dim = heads
        self.lab, self.heads, self.rows = lab, heads, rows
        pages = -(-keys // PAGE_SIZE)
        size = (pages * PAGE_SIZE, kv_heads, dim)
        item = lab.dtype.itemsize
        copies = max(1, CACHED_BYTES // (2 * size[0] * kv_heads * dim * item)) if lab.is_cuda else 1
        self.caches = [(lab.randn(*size), lab.randn(*size)) for _ in range(min(copies, 16))]
        self.q = lab.randn(rows, num_heads, dim)
        shape = AttentionShape(num_heads, kv_heads, dim, lab.dtype)
        self.spans = DeviceSpans.of(spans, shape, lab.device, lab.programs)
        self.scale = dim**-0.5
        self.out, self.lse = _states(lab, 1, rows, num_heads, dim)

    def calls(self, kernel: PrefixKernel = span_attention) -> list[Call]:
        return [
            partial(kernel, self.q, k, v, self.spans, self.scale, self.out, self.lse)
            for k, v in self.caches
        ]

    def compared(self) -> float:
        """Milliseconds of torch's flash attention. Raises Differ."""
        self.calls()[0]()
        ours = self.out.clone(), self.lse.clone()
        self.calls(prefix_attention_torch)[0]()
        for a, b in zip(ours, (self.out, self.lse), strict=True):
            difference = float((a - b).norm() / b.norm())
            if not difference <= MAX_DIFFERENCE:
                raise Differ(f"prefix kernels differ by {difference:.2g} at {self.rows} rows")
        return self.lab.seconds(self.calls(prefix_attention_torch)) * 1e3

    def row(self, kernel: str, name: str, pairs: int, keys: int, torch_ms: float | None) -> Row:
        """pairs: of a row and a key that it sees; keys: read at least once."""
        num_heads, kv_heads, dim = self.heads
        item = self.lab.dtype.itemsize
        num_bytes = 2 * keys * kv_heads * dim * item + self.rows * num_heads * dim * (item + 4)
        return _row(
            self.lab,
            (kernel, name, self.rows, keys),
            self.lab.seconds(self.calls()),
            self.lab.floor_s(num_bytes, 4.0 * pairs * num_heads * dim),
            torch_ms,
        )


def _row(
    lab: Lab,
    what: tuple[str, str, int, int],
    seconds: float,
    floor_s: float,
    torch_ms: float | None,
) -> Row:
    kernel, heads, rows, keys = what
    return {
        "kernel": kernel,
        "heads": heads,
        "rows": rows,
        "keys": keys,
        "ms": round(seconds * 1e3, 4),
        "floor_share": round(floor_s / seconds, 3),
        "torch_ms": None if torch_ms is None else round(torch_ms, 4),
    }


def _merge_row(lab: Lab, name: str, heads: tuple[int, int, int]) -> Row:
    states, rows = 2, 512 if lab.is_cuda else 3
    num_heads, _, dim = heads
    copies = 4 if lab.is_cuda else 1
    parts = [_states(lab, states, rows, num_heads, dim) for _ in range(copies)]
    for out, lse in parts:
        out.normal_()
        lse.normal_()
    result = torch.empty((rows, num_heads, dim), dtype=lab.dtype, device=lab.device)
    seconds = lab.seconds([partial(merge_states, out, lse, result) for out, lse in parts])
    num_bytes = rows * num_heads * (states * (dim + 1) * 4 + dim * lab.dtype.itemsize)
    floor_s = lab.floor_s(num_bytes, 0.0)
    return _row(lab, ("merge", name, rows, states), seconds, floor_s, None)


def _states(lab: Lab, states: int, rows: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty((states, rows, heads, dim), dtype=torch.float32, device=lab.device),
        torch.empty((states, rows, heads), dtype=torch.float32, device=lab.device),
    )

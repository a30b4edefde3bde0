"""Where an engine's decode step goes, part by part, each beside what it cannot go below.

Steps of the real engine (its queue, model, sampler and messages), chats in mid-answer below one
shared prefix; steps with a clock around each part alternate with steps without any, of which
`step_ms` is taken. `floor_ms`: weights (as they are packed) and K/V read once at the run's memory
bandwidth, or the products at its packed-GEMM peak, whichever is more; products with weights of at
most 8 bits at the peak of a GEMM of bytes, two of them for the head, whose inputs are two planes.
`python` is all that lies between the parts; `overhead_share`: of scheduling, messages and Python.
`scale`: tokens per second of the largest batch over those of 32 chats, and the larger of the two
overhead shares. `prefill` is a step that reads `tokens` of a prompt while nobody decodes.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from benchmarks.floors import Precision, kv_bytes_per_token, prefill_floor_s
from benchmarks.machine import Peak
from benchmarks.report import Options, Refused, Row, progress, run
from benchmarks.step_parts import PARTS, Clocks, clocks_in
from benchmarks.texts import text_ids
from engine.chunking import ChunkSize
from engine.config import EngineConfig
from engine.devices import resolve_dtype
from engine.engine import Engine
from engine.memory.page_pool import pages_for
from engine.messages import Cancel, Done, Failed, FromEngine, SamplingParams, Submit
from engine.model.geometry import ModelConfig
from engine.model.model_config import read_model_config
from engine.process import _Sender
from engine.request import State
from kernels.threading import configure_torch
from sessions.chunks import ChunkStore

Timed = tuple[int, int, str, dict[str, float], float]  # batch, prefix, sampler, parts, suffix

SCALE_FROM = 32  # chats, that the largest batch is held against
SUFFIX = 64  # tokens of each chat before it decodes
CHUNK = 2048  # tokens of prompts in a step, until all chats decode
WARM_UP_STEPS = 3
SAMPLERS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=1 << 20),
    "sampled": SamplingParams(temperature=0.7, top_p=0.95, max_tokens=1 << 20),
}


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    batches: tuple[int, ...]
    prefixes: tuple[int, ...]
    samplers: tuple[str, ...]
    steps: int  # with clocks, and as many without
    row_s: float  # a row ends after this time, though not before 4 steps of either kind
    chunks: tuple[int, ...]  # of prefill


QUICK = Sizes((1, 8, 32, 128), (64, 2048), ("greedy",), 24, 1.5, (64, 256, 1024))
FULL = Sizes(
    (1, 8, 32, 64, 128), (0, 64, 2048), ("greedy", "sampled"), 48, 4.0, (64, 256, 512, 1024, 2048)
)


@contextmanager
def null_sender() -> Iterator[_Sender]:
    """What an engine emits to in a server; another process takes what is sent."""
    ours, theirs = socket.socketpair()
    reader = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    theirs.close()
    sender = _Sender(ours)
    try:
        yield sender
    finally:
        sender.close()
        ours.close()
        reader.wait()


class WholeChunks(ChunkSize):
    """As many tokens of prompts a step as may be, also beside chats that decode.

    With a server's measure the first of 128 chats would outgrow their memory before the last one
    has begun.
    """

    def tokens(self, decoding: bool) -> int:
        return super().tokens(False)


class Steps:
    """Owns an engine and the chats that decode on it. One thread."""

    def __init__(
        self,
        options: Options,
        config: ModelConfig,
        sizes: Sizes,
        store: ChunkStore | None,
        out: _Sender,
    ) -> None:
        """Load the model, with memory for the largest batch below the longest prefix."""
        self._failed: list[Failed] = []
        self._out = out
        most, longest = max(sizes.batches), max(sizes.prefixes)
        tokens = SUFFIX + 2 * sizes.steps + WARM_UP_STEPS + 8
        pages = pages_for(longest) + most * pages_for(tokens) + pages_for(max(sizes.chunks)) + 8
        dtype = resolve_dtype(options.dtype)
        page_bytes = kv_bytes_per_token(config, dtype.itemsize) * 64
        self.engine = Engine(
            EngineConfig(
                model_dir=str(options.model_dir),
                model_name=options.model_name,
                dtype=options.dtype,
                weights=options.extra.weights,
                kv_memory_bytes=pages * page_bytes,
                max_batch=most,
                max_queue=most,
                share_prefix="auto",
                checkpoint_method="kv",
                idle_evict_s=1e6,
            ),
            store,
            self._emit,
        )
        self.engine._eos = frozenset()  # every answer goes on until it is cancelled
        self.engine.scheduler.chunk = WholeChunks(CHUNK)
        self._serial = 0
        self._running: list[str] = []

    def _emit(self, event: FromEngine) -> None:
        if isinstance(event, Failed):
            self._failed.append(event)
        if isinstance(event, Done) and event.finish != "cancelled":
            raise Refused("a chat ended before it was measured")
        self._out.emit(event)

    def begin(self, batch: int, prefix: int, sampling: SamplingParams) -> None:
        """Have that many chats of `SUFFIX` tokens decode below a prefix."""
        tokenizer = self.engine.tokenizer
        shift = random.Random(prefix + batch)
        for _ in range(batch):
            self._serial += 1
            self._running.append(f"r{self._serial}")
            self.engine.handle(
                Submit(
                    request_id=self._running[-1],
                    chat_id=f"chat{self._serial}",
                    prefix_ids=text_ids(tokenizer, prefix),
                    history_ids=[],
                    history_computed=0,
                    new_ids=text_ids(tokenizer, SUFFIX, skip=shift.randrange(1000)),
                    sampling=sampling,
                )
            )
        scheduler = self.engine.scheduler
        while any(r.state is not State.DECODE for r in (*scheduler.waiting, *scheduler.running)):
            self.step()

    def step(self) -> float:
        """Seconds of one step. Raises Refused when a chat failed."""
        began = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - began
        if self._failed:
            raise Refused(f"a chat failed: {self._failed[0].reason}")
        return seconds

    def end(self) -> None:
        """End what runs, and forget it."""
        for request_id in self._running:
            self.engine.handle(Cancel(request_id=request_id))
        self._running.clear()
        while self.engine.scheduler.resident.evict_one():
            pass

    def prefill(self, tokens: int) -> float:
        """Seconds of one step that reads a prompt's first tokens."""
        self.engine.scheduler.chunk = WholeChunks(tokens)
        ids = text_ids(self.engine.tokenizer, tokens)
        self._serial += 1
        self.engine.handle(
            Submit(
                request_id=f"r{self._serial}",
                chat_id=f"chat{self._serial}",
                prefix_ids=[],
                history_ids=[],
                history_computed=0,
                new_ids=ids,
                sampling=SAMPLERS["greedy"],
            )
        )
        seconds = self.step()
        self._running = [f"r{self._serial}"]
        self.end()
        return seconds


def floors(
    config: ModelConfig, bytes_of: Precision, peak: Peak, batch: int, prefix: int, suffix: float
) -> dict[str, float]:
    """Milliseconds that each part, and a whole step, cannot go below; parts not named: nothing."""
    each = {
        "projections": bytes_of.layers_work(config, batch),
        "head": bytes_of.head_work(config, batch),
        "prefix_attention": bytes_of.attention_work(config, prefix, batch * prefix),
        "suffix_attention": bytes_of.attention_work(config, batch * suffix, batch * suffix),
    }
    parts = {name: peak.floor_s(*work) * 1e3 for name, work in each.items()}
    return {**parts, "step": sum(parts.values())}


def _decode_row(
    steps: Steps, sizes: Sizes, batch: int, prefix: int, sampler: str
) -> tuple[dict[str, float], float]:
    """Median milliseconds of the parts and of a step, and the mean suffix of the rows."""
    steps.begin(batch, prefix, SAMPLERS[sampler])
    for _ in range(WARM_UP_STEPS):
        steps.step()
    clocks = Clocks()
    plain: list[float] = []
    parts: list[dict[str, float]] = []
    ends = time.perf_counter() + sizes.row_s
    while len(plain) < sizes.steps and (len(plain) < 4 or time.perf_counter() < ends):
        with clocks_in(steps.engine, clocks):
            clocks.begin()
            parts.append(clocks.end(steps.step()))
        plain.append(steps.step())
    steps.end()
    found = {part: statistics.median(row[part] for row in parts) for part in (*PARTS, "python")}
    found["step"] = statistics.median(plain) * 1e3
    return found, SUFFIX + WARM_UP_STEPS + len(plain)


def measure(options: Options) -> Row:
    """Run it; returns the result."""
    configure_torch()
    sizes = QUICK if options.quick else FULL
    dtype = resolve_dtype(options.dtype)
    config = read_model_config(options.model_dir)
    peak = machine.measure_peak(dtype, quick=options.quick)
    timed: list[Timed] = []
    prefill: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as directory, null_sender() as out:
        store = ChunkStore([Path(directory)], cap_bytes=4 << 30)
        steps = Steps(options, config, sizes, store, out)
        for sampler in sizes.samplers:
            for prefix in sizes.prefixes:
                for batch in sizes.batches:
                    progress(f"{batch} chats, prefix {prefix}, {sampler}")
                    found = _decode_row(steps, sizes, batch, prefix, sampler)
                    timed.append((batch, prefix, sampler, *found))
        for tokens in sizes.chunks:
            progress(f"prefill of {tokens}")
            times = [steps.prefill(tokens) for _ in range(4 if options.quick else 8)]
            prefill.append((tokens, statistics.median(times[1:])))
        format = steps.engine.info.weights
        bytes_of = Precision.of_weights(steps.engine.runner.decoder.weights)
        steps.engine.close()
        store.close()
    peak = peak.better(machine.measure_peak(dtype, quick=options.quick))
    return {
        "model": options.model_name,
        "dtype": "bf16" if dtype.itemsize == 2 else "fp32",
        "weights": format,
        "machine": machine.describe(),
        **peak.row(),
        "suffix": SUFFIX,
        "rows": [_row(config, bytes_of, peak, *row) for row in timed],
        "floors": [_floor_row(config, bytes_of, peak, *row) for row in timed],
        "scale": _scale(timed),
        "prefill": [_prefill_row(config, bytes_of, peak, *row) for row in prefill],
    }


def _row(
    config: ModelConfig,
    bytes_of: Precision,
    peak: Peak,
    batch: int,
    prefix: int,
    sampler: str,
    parts: dict[str, float],
    suffix: float,
) -> Row:
    floor = floors(config, bytes_of, peak, batch, prefix, suffix)["step"]
    return {
        "batch": batch,
        "prefix": prefix,
        "sampler": sampler,
        "step_ms": round(parts["step"], 3),
        "floor_ms": round(floor, 3),
        "floor_share": round(floor / parts["step"], 3),
        "tok_s": round(batch / parts["step"] * 1e3, 1),
        **{f"{part}_ms": round(parts[part], 3) for part in (*PARTS, "python")},
        "overhead_share": round(_overhead_share(parts), 3),
    }


def _floor_row(
    config: ModelConfig,
    bytes_of: Precision,
    peak: Peak,
    batch: int,
    prefix: int,
    sampler: str,
    parts: dict[str, float],
    suffix: float,
) -> Row:
    found = floors(config, bytes_of, peak, batch, prefix, suffix)
    row: Row = {"batch": batch, "prefix": prefix, "sampler": sampler}
    for part, floor in found.items():
        row[f"{part}_ms"] = round(floor, 3)
        row[f"{part}_share"] = round(floor / parts[part], 3) if parts[part] else 0.0
    return row


def _overhead_share(parts: dict[str, float]) -> float:
    """Of scheduling, messages and Python in a step."""
    return (parts["scheduling"] + parts["answers"] + parts["python"]) / parts["step"]


def _scale(timed: Sequence[Timed]) -> list[Row]:
    """The largest batch beside `SCALE_FROM` chats, for what has both."""
    by_key = {(prefix, sampler, batch): parts for batch, prefix, sampler, parts, _ in timed}
    most = max(batch for batch, *_ in timed)
    rows: list[Row] = []
    for (prefix, sampler, batch), few in by_key.items():
        many = by_key.get((prefix, sampler, most))
        if batch == SCALE_FROM and many is not None and most > SCALE_FROM:
            rate = most / many["step"] * 1e3
            rows.append(
                {
                    "prefix": prefix,
                    "sampler": sampler,
                    "batch": most,
                    "tok_s": round(rate, 1),
                    "ratio": round(rate / (SCALE_FROM / few["step"] * 1e3), 3),
                    "overhead_share": round(max(map(_overhead_share, (few, many))), 3),
                }
            )
    return rows


def _prefill_row(
    config: ModelConfig, bytes_of: Precision, peak: Peak, tokens: int, seconds: float
) -> Row:
    floor = prefill_floor_s(config, bytes_of, peak, tokens)
    return {
        "tokens": tokens,
        "step_ms": round(seconds * 1e3, 2),
        "floor_ms": round(floor * 1e3, 2),
        "floor_share": round(floor / seconds, 3),
        "tok_s": round(tokens / seconds, 1),
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=["bf16", "fp32", "int8", "int4"],
        default="auto",
        help="their format, the dtype unless given",
    )


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return run("step", __doc__, measure, argv, _add_options)


if __name__ == "__main__":
    sys.exit(main())

"""Reading a prompt: tokens per second until its first answer token, beside the floor and others.

The engine as a server runs it (queue, chunks of `chunk` tokens, model, sampler), without
checkpoints; each run reads a text that no cache has seen, and nobody else is answered. `floor_ms`:
products at the run's GEMM peak, with weights of at most 8 bits at that of a GEMM of bytes;
`gemm_share`: the share of what the same products cost at the peak of the dtype.

When asked for, with `--gguf`, the model as a GGUF file: `vs_openvino` (prefix caching on, as in
`benchmarks.decode`) and `vs_llamacpp` (`llama-batched-bench`, which makes up its own tokens). Each
runs in a process of its own with as many threads as ours, the sides in turn; of OpenVINO the first
greedy tokens must be ours in half of the runs (`agreement`). Medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks import engines, machine
from benchmarks.agreement import same_choices
from benchmarks.floors import Precision, kv_bytes_per_token, prefill_floor_s
from benchmarks.machine import Peak
from benchmarks.report import Options, Refused, Row, floor_shares, progress, run
from benchmarks.texts import text_ids
from engine.config import EngineConfig
from engine.devices import resolve_dtype
from engine.engine import Engine
from engine.memory.page_pool import PAGE_SIZE, pages_for
from engine.messages import Delta, Failed, FromEngine, SamplingParams, Submit
from engine.model.geometry import ModelConfig
from engine.model.model_config import read_model_config
from kernels.threading import configure_torch

STRIDE = 61  # tokens between the beginnings of two runs' texts
SPARE_PAGES = 8
OURS = "ours"


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    tokens: tuple[int, ...]
    rounds: int  # behind one that is not counted


QUICK = Sizes((512, 1024, 2048), 2)
FULL = Sizes((512, 1024, 2048), 8)


class Side(Protocol):
    """Ours, or another engine."""

    def prefill_seconds(self, ids: list[int]) -> tuple[float, int | None]: ...


class Reading:
    """Owns an engine that reads one prompt after the other. One thread."""

    def __init__(self, options: Options, config: ModelConfig, most_tokens: int) -> None:
        """Load the model, with memory for the longest prompt."""
        page_bytes = kv_bytes_per_token(config, resolve_dtype(options.dtype).itemsize) * PAGE_SIZE
        self._events: list[FromEngine] = []
        self._serials = itertools.count()
        self.config = EngineConfig(
            model_dir=str(options.model_dir),
            model_name=options.model_name,
            dtype=options.dtype,
            weights=options.extra.weights,
            kv_memory_bytes=(pages_for(most_tokens) + SPARE_PAGES) * page_bytes,
            max_batch=1,
            max_queue=1,
        )
        self.engine = Engine(self.config, None, self._events.append)
        self.engine._eos = frozenset()  # any first token counts

    def prefill_seconds(self, ids: list[int]) -> tuple[float, int]:
        """Seconds from the request to its first greedy token, and that. Raises Refused."""
        serial = next(self._serials)
        submit = Submit(
            request_id=f"r{serial}",
            chat_id=f"chat{serial}",
            prefix_ids=[],
            history_ids=[],
            history_computed=0,
            new_ids=ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
        )
        self._events.clear()
        began = time.perf_counter()
        self.engine.handle(submit)
        while self.engine.has_work():
            self.engine.step()
        seconds = time.perf_counter() - began
        while self.engine.scheduler.resident.evict_one():
            pass
        for event in self._events:
            if isinstance(event, Failed):
                raise Refused(f"a prompt was not read: {event.reason}")
            if isinstance(event, Delta):
                return seconds, event.token_ids[0]
        raise Refused("a prompt was read, but no token followed")

    @property
    def precision(self) -> Precision:
        return Precision.of_weights(self.engine.runner.decoder.weights)


class Benchmark:
    """One run: owns our side, collects times and first tokens of all sides by their keys."""

    def __init__(self, reading: Reading, others: list[engines.Engine], sizes: Sizes) -> None:
        self._reading, self._others, self._sizes = reading, others, sizes
        self.keys = [OURS, *(engine.key for engine in others)]
        self.seconds: dict[tuple[str, int], float] = {}  # (side, tokens) -> the median
        self._firsts: dict[str, list[int | None]] = defaultdict(list)

    def run(self) -> None:
        """Take every length, the sides in turn. Raises Refused."""
        sides: dict[str, Side] = {OURS: self._reading, **{one.key: one for one in self._others}}
        texts = itertools.count()
        for tokens in self._sizes.tokens:
            times: dict[str, list[float]] = defaultdict(list)
            for number in range(-1, self._sizes.rounds):
                progress(
                    f"{tokens} tokens, " + (f"round {number + 1}" if number >= 0 else "warm-up")
                )
                tokenizer = self._reading.engine.tokenizer
                ids = text_ids(tokenizer, tokens, skip=STRIDE * next(texts))
                for key in self.keys if number % 2 else reversed(self.keys):
                    seconds, first = sides[key].prefill_seconds(ids)
                    self._firsts[key].append(first)
                    if number >= 0:
                        times[key].append(seconds)
            for key, each in times.items():
                self.seconds[key, tokens] = statistics.median(each)

    def agreement(self, key: str) -> float | None:
        """Share of the runs whose first token is ours; None: it does not tell. Raises Refused."""
        theirs = [token for token in self._firsts[key] if token is not None]
        ours = [token for token in self._firsts[OURS] if token is not None]
        return same_choices(f"{key}, prompts", ours, theirs) if theirs else None

    def our_rows(
        self, model: str, config: ModelConfig, peak: Peak, dtype: torch.dtype
    ) -> list[Row]:
        """Our times beside their floor."""
        wide = Precision(dtype.itemsize, dtype.itemsize)
        rows: list[Row] = []
        for tokens in self._sizes.tokens:
            seconds = self.seconds[OURS, tokens]
            floor_s = prefill_floor_s(config, self._reading.precision, peak, tokens)
            rows.append(
                {
                    "model": model,
                    "tokens": tokens,
                    "ms": round(seconds * 1e3, 1),
                    "tok_s": round(tokens / seconds, 1),
                    "floor_ms": round(floor_s * 1e3, 1),
                    "floor_share": round(floor_s / seconds, 3),
                    "gemm_share": round(prefill_floor_s(config, wide, peak, tokens) / seconds, 3),
                }
            )
        return rows

    def rows(
        self, key: str, model: str, config: ModelConfig, peak: Peak, theirs: Precision
    ) -> list[Row]:
        """Ours beside another engine."""
        agreement = self.agreement(key)
        rows: list[Row] = []
        for tokens in self._sizes.tokens:
            ours_s, theirs_s = self.seconds[OURS, tokens], self.seconds[key, tokens]
            floors = (
                prefill_floor_s(config, precision, peak, tokens)
                for precision in (self._reading.precision, theirs)
            )
            row: Row = {
                "model": model,
                "tokens": tokens,
                "ratio": round(theirs_s / ours_s, 3),
                "ours_tok_s": round(tokens / ours_s, 1),
                "theirs_tok_s": round(tokens / theirs_s, 1),
                **floor_shares(next(floors) / ours_s, next(floors) / theirs_s),
            }
            if agreement is not None:
                row["agreement"] = round(agreement, 3)
            rows.append(row)
        return rows


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    configure_torch()
    sizes = sizes or (QUICK if options.quick else FULL)
    dtype = resolve_dtype(options.dtype)
    config = read_model_config(options.model_dir)
    about = machine.describe()
    with engines.open_engines(
        options,
        config,
        threads=torch.get_num_threads(),
        most_rows=1,
        most_tokens=2 * max(sizes.tokens),  # OpenVINO keeps the last one
    ) as (others, weight_bytes):
        about["versions"].update({engine.name: engine.version for engine in others})
        peak = machine.measure_peak(dtype, quick=options.quick)
        progress(f"loading {options.model_name}")
        reading = Reading(options, config, max(sizes.tokens))
        benchmark = Benchmark(reading, others, sizes)
        benchmark.run()
    peak = peak.better(machine.measure_peak(dtype, quick=options.quick))
    model = options.model_name
    return {
        "model": model,
        "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
        "weights": reading.engine.info.weights,
        "chunk": reading.config.prefill_chunk,
        "machine": about,
        **peak.row(),
        "prefill": benchmark.our_rows(model, config, peak, dtype),
        **{
            engine.key: benchmark.rows(
                engine.key, model, config, peak, Precision(weight_bytes, engine.kv_bytes)
            )
            for engine in others
        },
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    engines.add_options(parser)
    parser.add_argument(
        "--weights",
        choices=["bf16", "fp32", "int8", "int4"],
        default="auto",
        help="format of our weights, the dtype unless given",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("prefill", __doc__, measure, argv, _add_options)


if __name__ == "__main__":
    sys.exit(main())

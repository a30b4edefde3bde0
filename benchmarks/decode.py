"""Decoding over a shared prefix: ours against the same without sharing, and against transformers.

`shared_vs_unshared`: the same pages and production kernels, reading the prefix once a step or once
a row. `vs_transformers`: its model with a DynamicCache in the same dtype, with whichever of its
attentions is faster (`transformers_attention`, by batch). `flatness`: tokens per second with a
long prefix over those with a short one, both shared (1: the prefix costs nothing).
Every step is run by both sides in turn on the same token ids, and their logits are compared.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks import machine
from benchmarks.agreement import check_logits
from benchmarks.decoding import Decoding, Side
from benchmarks.floors import decode_floor_s
from benchmarks.machine import Peak
from benchmarks.report import Options, Refused, Row, floor_shares, progress, run
from benchmarks.texts import text_ids
from benchmarks.transformers_side import TransformersSide
from engine.loading import resolve_dtype
from kernels.threading import configure_torch

MIN_STEPS = 2
ORDER: tuple[tuple[Side, Side], ...] = (("shared", "unshared"), ("unshared", "shared"))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; lengths in tokens."""

    batches: tuple[int, ...]
    prefixes: tuple[int, ...]  # ascending; each gives its rows
    peer_batches: tuple[int, ...]  # with the longest of the prefixes that peers are given
    peer_prefix: int
    flat_batches: tuple[int, ...]
    flat: tuple[int, int]  # short and long
    suffix: int
    steps: int
    peer_steps: int
    row_s: float  # a row ends after this time, though not before MIN_STEPS steps


QUICK = Sizes(
    batches=(1, 8, 32),
    prefixes=(256, 2048),
    peer_batches=(8, 32),
    peer_prefix=2048,
    flat_batches=(32,),
    flat=(256, 2048),
    suffix=32,
    steps=8,
    peer_steps=3,
    row_s=1.5,
)
FULL = Sizes(
    batches=(1, 2, 4, 8, 32),
    prefixes=(0, 64, 512, 1024, 2048, 4096),
    peer_batches=(1, 8, 32),
    peer_prefix=2048,
    flat_batches=(8, 32),
    flat=(512, 4096),
    suffix=64,
    steps=24,
    peer_steps=6,
    row_s=20.0,
)


@dataclass(frozen=True)
class Comparison:
    """Median seconds of a step of both sides."""

    batch: int
    prefix: int
    suffix: float  # the mean over the timed steps
    ours_s: float
    theirs_s: float
    kl: float


class Benchmark:
    """One run: owns both sides and collects the rows."""

    def __init__(self, options: Options, sizes: Sizes, dtype: torch.dtype) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.model = options.model_name
        self.max_batch = max(*sizes.batches, *sizes.peer_batches, *sizes.flat_batches)
        most_steps = max(sizes.steps, sizes.peer_steps) + 2
        self.decoding = Decoding(
            options.model_dir,
            dtype,
            self.max_batch,
            max(*sizes.prefixes, sizes.peer_prefix, *sizes.flat),
            sizes.suffix + most_steps,
        )
        limit = self.decoding.config.max_position_embeddings
        longest = max(*sizes.prefixes, sizes.peer_prefix, *sizes.flat) + sizes.suffix + most_steps
        if longest > limit:
            raise Refused(f"{longest} tokens are needed; the model's context holds {limit}")
        self.shared_vs_unshared: list[Comparison] = []
        self.vs_transformers: list[Comparison] = []
        self.peer_attention: dict[str, str] = {}  # transformers' fastest, by batch
        self.shared_s: dict[tuple[int, int], float] = {}  # (batch, prefix) -> seconds a step

    def run(self, transformers: TransformersSide) -> None:
        """Take every row, one prefix after the other."""
        for prefix in sorted({*self.sizes.prefixes, self.sizes.peer_prefix, *self.sizes.flat}):
            self._begin(prefix)
            for batch in sorted({*self.sizes.batches, *self.sizes.flat_batches}):
                progress(f"prefix {prefix}, batch {batch}: shared and unshared")
                comparison = self._compare_sharing(batch, prefix)
                if batch in self.sizes.batches and prefix in self.sizes.prefixes:
                    self.shared_vs_unshared.append(comparison)
            if prefix == self.sizes.peer_prefix:
                self._check_prefill(transformers)
                for batch in self.sizes.peer_batches:
                    progress(f"prefix {prefix}, batch {batch}: transformers")
                    self.vs_transformers.append(self._compare_transformers(transformers, batch))

    def flatness(self) -> list[Row]:
        """Throughput with the long prefix over that with the short one."""
        short, long = self.sizes.flat
        return [
            {
                "batch": batch,
                "short_prefix": short,
                "long_prefix": long,
                "ratio": round(self.shared_s[batch, short] / self.shared_s[batch, long], 3),
            }
            for batch in self.sizes.flat_batches
        ]

    def _begin(self, prefix: int) -> None:
        tokenizer, suffix = self.decoding.tokenizer, self.sizes.suffix
        self.prefix_ids = text_ids(tokenizer, prefix)
        self.suffixes = [
            text_ids(tokenizer, suffix, skip=37 * (i + 1)) for i in range(self.max_batch)
        ]
        self.decoding.begin(self.prefix_ids, self.suffixes)

    def _compare_sharing(self, batch: int, prefix: int) -> Comparison:
        decoding = self.decoding
        decoding.rewind(self.sizes.suffix + 1)
        times: dict[Side, list[float]] = {"shared": [], "unshared": []}
        divergences: list[float] = []
        for number in self._numbers(self.sizes.steps):
            results = {}
            for side in ORDER[number % 2]:
                seconds, logits, tokens = decoding.step(side, batch)
                results[side] = (logits, tokens)
                if number >= 0:
                    times[side].append(seconds)
            what = f"prefix {prefix}, batch {batch}, shared and unshared"
            ours, theirs = results["shared"], results["unshared"]
            divergences.append(check_logits(what, ours[0], theirs[0], self.dtype))
            decoding.advance(ours[1])
        medians = {side: statistics.median(values) for side, values in times.items()}
        self.shared_s[batch, prefix] = medians["shared"]
        return self._result(batch, prefix, medians["shared"], medians["unshared"], divergences)

    def _numbers(self, steps: int) -> Iterator[int]:
        """Step numbers of one row; the first, -1, is a warm-up."""
        began = time.perf_counter()
        for number in range(-1, steps):
            if number >= MIN_STEPS and time.perf_counter() - began > self.sizes.row_s:
                return
            yield number

    def _check_prefill(self, transformers: TransformersSide) -> None:
        theirs = transformers.last_logits(self.prefix_ids + self.suffixes[0])
        ours = self.decoding.first_logits[:1]
        check_logits("prefill, ours and transformers", ours, theirs, self.dtype)

    def _compare_transformers(self, transformers: TransformersSide, batch: int) -> Comparison:
        decoding = self.decoding
        decoding.rewind(self.sizes.suffix + 1)
        transformers.begin(decoding, batch)
        transformers.choose_attention([seq.ids[-1] for seq in decoding.sequences[:batch]])
        self.peer_attention[str(batch)] = transformers.attention
        ours_s: list[float] = []
        theirs_s: list[float] = []
        divergences: list[float] = []
        for number in self._numbers(self.sizes.peer_steps):
            last = [seq.ids[-1] for seq in decoding.sequences[:batch]]
            if number % 2:
                theirs, theirs_logits = transformers.step(last)
                ours, logits, tokens = decoding.step("shared", batch)
            else:
                ours, logits, tokens = decoding.step("shared", batch)
                theirs, theirs_logits = transformers.step(last)
            if number >= 0:
                ours_s.append(ours)
                theirs_s.append(theirs)
            what = f"batch {batch}, ours and transformers"
            divergences.append(check_logits(what, logits, theirs_logits, self.dtype))
            decoding.advance(tokens)
        transformers.end()
        ours, theirs = statistics.median(ours_s), statistics.median(theirs_s)
        return self._result(batch, decoding.prefix, ours, theirs, divergences)

    def _result(
        self, batch: int, prefix: int, ours_s: float, theirs_s: float, divergences: list[float]
    ) -> Comparison:
        suffix = self.sizes.suffix + 1 + len(divergences) / 2
        return Comparison(batch, prefix, suffix, ours_s, theirs_s, statistics.mean(divergences))

    def rows(self, comparisons: list[Comparison], peak: Peak) -> list[Row]:
        """The contract's rows, with each side's share of its floor."""
        return [self._row(one, peak) for one in comparisons]

    def _row(self, one: Comparison, peak: Peak) -> Row:
        def floor(shared: bool) -> float:
            return decode_floor_s(
                self.decoding.config,
                self.dtype.itemsize,
                peak,
                batch=one.batch,
                prefix=one.prefix,
                suffix=one.suffix,
                shared=shared,
            )

        return {
            "model": self.model,
            "batch": one.batch,
            "prefix": one.prefix,
            "suffix": round(one.suffix),
            "ratio": round(one.theirs_s / one.ours_s, 3),
            "ours_tok_s": round(one.batch / one.ours_s, 1),
            "theirs_tok_s": round(one.batch / one.theirs_s, 1),
            **floor_shares(floor(True) / one.ours_s, floor(False) / one.theirs_s),
            "kl": float(f"{one.kl:.2g}"),
        }


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    configure_torch()
    sizes = sizes or (QUICK if options.quick else FULL)
    dtype = resolve_dtype(options.dtype)
    about = machine.describe()
    progress("memory bandwidth and GEMM peak")
    peak = machine.measure_peak(dtype, quick=options.quick)
    progress(f"loading {options.model_name}")
    benchmark = Benchmark(options, sizes, dtype)
    benchmark.run(TransformersSide(options.model_dir, dtype))
    peak = peak.better(machine.measure_peak(dtype, quick=options.quick))
    return {
        "model": options.model_name,
        "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
        "machine": about,
        "memory_gb_s": round(peak.bytes_per_s / 1e9, 1),
        "gemm_gflop_s": round(peak.flops_per_s / 1e9, 1),
        "shared_vs_unshared": benchmark.rows(benchmark.shared_vs_unshared, peak),
        "vs_transformers": benchmark.rows(benchmark.vs_transformers, peak),
        "transformers_attention": benchmark.peer_attention,
        "flatness": benchmark.flatness(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("decode", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Decoding over a shared prefix: ours against the same without sharing, and against others.

`shared_vs_unshared`: the same pages and production kernels, reading the prefix once a step where
the gate, measured in this run, says so (`gate`: whether it did), or once a row; also for a model of
multi-head attention (random weights in SmolLM2-1.7B's shape with fewer layers; not with `--quick`).
A prefix may exceed the model's context: speed does not depend on what the model makes of it.
`memory`: bytes of the pages that the longest prefix and the largest batch hold, over those of one
prefix and the suffixes to the token. `vs_transformers`: its model with a DynamicCache in the same
dtype, with whichever of its attentions is faster (`transformers_attention`, by batch). `flatness`:
tokens per second with a long prefix over those with a short one, both shared (1: the prefix costs
nothing).
Every step is run by both sides in turn on the same token ids, and their logits are compared.

When asked for, with `--gguf`, the model as a GGUF file: `vs_openvino` (OpenVINO GenAI, paged
attention, prefix caching) and `vs_llamacpp` (`llama-batched-bench`, its shared prompt, the faster
of its K/V layouts). Each runs in a process of its own with as many threads as ours, and rounds of
decoding alternate with ours; prefill is not timed. They read the file's 4-bit weights where ours
computes in the dtype named here, so this compares engines as they come, not the same arithmetic,
and no logits: of OpenVINO, which decodes the same token ids, the first greedy tokens must be ours
in half of the rows (`agreement`); llama.cpp decodes random tokens (a prefix of 0 is one token to
it) that it does not show, so only the file's geometry and what it says it ran are checked; its rows
grow from nothing to where ours end, and so hold fewer keys on average, to its advantage. Ours
is timed without the queue, OpenVINO's step with its scheduler.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import engines, machine
from benchmarks.agreement import Agreement, check_logits
from benchmarks.comparison import Comparison
from benchmarks.decode_sizes import FULL, QUICK, Sizes
from benchmarks.decoding import Decoding, Side
from benchmarks.engines import Engine
from benchmarks.floors import Precision, kv_bytes_per_token
from benchmarks.geometry import MHA_DECODE_LAYERS, make_mha_model
from benchmarks.machine import Peak
from benchmarks.report import Options, Row, progress, run
from benchmarks.texts import text_ids
from benchmarks.transformers_side import TransformersSide
from engine.devices import resolve_dtype
from engine.model.model_config import read_model_config
from engine.profile.weight_figures import WeightFormat
from kernels.threading import configure_torch

MIN_STEPS = 2
ORDER: tuple[tuple[Side, Side], ...] = (("shared", "unshared"), ("unshared", "shared"))


class Benchmark:
    """One run over one model: owns both sides and collects the rows."""

    def __init__(
        self,
        model_dir: Path,
        sizes: Sizes,
        dtype: torch.dtype,
        format: WeightFormat | None = None,
    ) -> None:
        """format: of our weights; None: the dtype."""
        self.sizes, self.dtype = sizes, dtype
        self.model = model_dir.name
        self.max_batch = sizes.most_rows
        self.decoding = Decoding(
            model_dir,
            dtype,
            sizes.most_rows,
            sizes.longest_prefix,
            sizes.longest_suffix,
            format,
        )
        self.precision = Precision.of_weights(self.decoding.weights)
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

    def run_mha(self) -> None:
        """Shared and unshared alone, with this model."""
        for prefix in self.sizes.mha_prefixes:
            self._begin(prefix)
            for batch in self.sizes.mha_batches:
                progress(f"{self.model}: prefix {prefix}, batch {batch}")
                self.shared_vs_unshared.append(self._compare_sharing(batch, prefix))

    def memory(self) -> Row:
        """What the longest prefix and the largest batch hold of K/V memory."""
        prefix, batch = max(self.sizes.prefixes), max(self.sizes.batches)
        self._begin(prefix)
        tokens = prefix + sum(len(seq.ids) for seq in self.decoding.sequences[:batch])
        exact = tokens * kv_bytes_per_token(self.decoding.config, self.dtype.itemsize)
        held = self.decoding.held_bytes(batch)
        return {
            "batch": batch,
            "prefix": prefix,
            "suffix": self.sizes.suffix,
            "held_mib": round(held / 2**20, 1),
            "exact_mib": round(exact / 2**20, 1),
            "ratio": round(held / exact, 3),
        }

    def run_engines(self, others: list[Engine]) -> dict[str, list[Comparison]]:
        """Every row beside other engines, by the engine's key."""
        comparisons: dict[str, list[Comparison]] = {engine.key: [] for engine in others}
        sizes = self.sizes
        for prefix in sizes.engine_prefixes if others else ():
            self._begin(prefix)
            first_tokens = self.decoding.first_logits.argmax(-1).tolist()
            for engine in others:
                engine.begin(self.prefix_ids, self.suffixes, first_tokens)
                for batch in sizes.engine_batches:
                    progress(f"prefix {prefix}, batch {batch}: {engine.key}")
                    comparisons[engine.key].append(
                        engines.compare(
                            engine,
                            self.decoding,
                            batch,
                            sizes.suffix,
                            sizes.engine_steps,
                            sizes.engine_rounds,
                        )
                    )
        return comparisons

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
        agreement = Agreement(f"prefix {prefix}, batch {batch}, shared and unshared", self.dtype)
        for number in self._numbers(self.sizes.steps):
            results = {}
            for side in ORDER[number % 2]:
                seconds, logits, tokens = decoding.step(side, batch)
                results[side] = (logits, tokens)
                if number >= 0:
                    times[side].append(seconds)
            ours, theirs = results["shared"], results["unshared"]
            agreement.add(ours[0], theirs[0])
            decoding.advance(ours[1])
        medians = {side: statistics.median(values) for side, values in times.items()}
        self.shared_s[batch, prefix] = medians["shared"]
        steps = len(times["shared"])
        row = self._result(
            batch, prefix, medians["shared"], medians["unshared"], steps, agreement.check()
        )
        row.notes["gate"] = prefix > 0 and decoding.gate.shares(prefix, batch)
        return row

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
        agreement = Agreement(f"batch {batch}, ours and transformers", self.dtype)
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
            agreement.add(logits, theirs_logits)
            decoding.advance(tokens)
        transformers.end()
        ours, theirs = statistics.median(ours_s), statistics.median(theirs_s)
        steps = len(ours_s)
        return self._result(batch, decoding.prefix, ours, theirs, steps, agreement.check())

    def _result(
        self, batch: int, prefix: int, ours_s: float, theirs_s: float, steps: int, kl: float
    ) -> Comparison:
        suffix = self.sizes.suffix + 1 + (steps + 1) / 2  # a step more warms up
        return Comparison(batch, prefix, suffix, ours_s, theirs_s, {"kl": float(f"{kl:.2g}")})

    def rows(
        self, comparisons: list[Comparison], peak: Peak, theirs: Precision | None = None
    ) -> list[Row]:
        """The contract's rows, with each side's share of its floor; `theirs` if not as ours."""
        config, ours = self.decoding.config, self.precision
        return [one.row(self.model, config, peak, ours, theirs or ours) for one in comparisons]


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    configure_torch()
    sizes = sizes or (QUICK if options.quick else FULL)
    dtype = resolve_dtype(options.dtype)
    format: WeightFormat | None = getattr(options.extra, "weights", None)
    about = machine.describe()
    with engines.open_engines(
        options,
        read_model_config(options.model_dir),
        threads=torch.get_num_threads(),
        most_rows=max(sizes.engine_batches),
        most_tokens=max(sizes.engine_prefixes) + sizes.longest_suffix,
    ) as (others, weight_bytes):
        about["versions"].update({engine.name: engine.version for engine in others})
        progress("memory bandwidth and GEMM peak")
        peak = machine.measure_peak(dtype, quick=options.quick)
        progress(f"loading {options.model_name}")
        benchmark = Benchmark(options.model_dir, sizes, dtype, format)
        benchmark.run(TransformersSide(options.model_dir, dtype))
        memory = benchmark.memory()
        versus = benchmark.run_engines(others)
    mha_rows = _mha(options, sizes, dtype, peak, format)
    peak = peak.better(machine.measure_peak(dtype, quick=options.quick))
    return {
        "model": options.model_name,
        "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
        "weights": format or "as the dtype",
        "machine": about,
        **peak.row(),
        "shared_vs_unshared": [*benchmark.rows(benchmark.shared_vs_unshared, peak), *mha_rows],
        "memory": [memory],
        "vs_transformers": benchmark.rows(benchmark.vs_transformers, peak),
        "transformers_attention": benchmark.peer_attention,
        "flatness": benchmark.flatness(),
        **{
            engine.key: benchmark.rows(
                versus[engine.key], peak, Precision(weight_bytes, engine.kv_bytes)
            )
            for engine in others
        },
    }


def _mha(
    options: Options, sizes: Sizes, dtype: torch.dtype, peak: Peak, format: WeightFormat | None
) -> list[Row]:
    """Rows of a model with multi-head attention; its random weights lie on no 4-bit grid."""
    format = "int8" if format == "int4" else format
    if not sizes.mha_batches:
        return []
    with tempfile.TemporaryDirectory() as parent:
        model = make_mha_model(Path(parent), options.model_dir, layers=MHA_DECODE_LAYERS)
        benchmark = Benchmark(model, sizes, dtype, format)
        benchmark.run_mha()
        return benchmark.rows(benchmark.shared_vs_unshared, peak)


def _add_options(parser: argparse.ArgumentParser) -> None:
    engines.add_options(parser)
    parser.add_argument(
        "--weights",
        choices=["bf16", "fp32", "int8", "int4"],
        help="format of our weights, the dtype unless given; transformers' are the dtype always",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("decode", __doc__, measure, argv, _add_options)


if __name__ == "__main__":
    sys.exit(main())

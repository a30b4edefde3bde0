"""A chat that comes back after a restart: time to its first token by every restore method.

Each method has a data directory and an engine of its own; the engine that saves ends before the
one that resumes starts (`auto` starts from a copy of the directory of the method that it chose, as
they would write the same bytes). The shared prefix is brought back first, as a running server has
it; then the chat comes back cold, in rounds that take the methods in turn, at the disk's own speed
and throttled. Every first answer after the restart is compared with that of a chat that was never
evicted, every later one with the first.

`restore_ms`: until the history's K/V are back; `ttft_ms`: the returning turn's first token, from
the engine's receipt. `predicted_ms` is a first, simple model: the larger of bytes over the raw
bandwidth and of compute that was measured apart from the rounds (the recording turn's prefill for
`recompute`, the first restore after the restart for the others); it knows no fill and drain, and
not that reader threads and engine share the cores. `lower_bound_ms`: the best plan by brute force
at the raw bandwidth and the packed-GEMM peak of this run; `floor_share` is the same bound for the
row's own plan over its `restore_ms`. `recompute` reads nothing: it is measured at the disk's own
speed only, and its rows at other speeds repeat that figure (`--quick`: that after the restart).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.floors import RestoreCosts, kv_bytes_per_token
from benchmarks.geometry import make_mha_model
from benchmarks.machine import Peak, RawDisk
from benchmarks.report import Options, Refused, Row, progress, run
from benchmarks.resuming import Chat, Side, Turn, check_turn
from benchmarks.texts import default_prefix_ids, text_ids
from engine.config import CheckpointMethod
from engine.devices import resolve_dtype
from engine.model.model_config import ModelConfig, read_model_config
from engine.model.tokenizer import ChatTokenizer
from engine.restoration.plan import choose_plan
from kernels.threading import configure_torch

METHODS: tuple[CheckpointMethod, ...] = ("recompute", "kv", "hidden", "auto")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; lengths in tokens."""

    tokens: int  # of the chat's own history
    max_prefix: int  # the default assistant's prompt is cut to this
    mbps: tuple[int, ...]  # throttled speeds, 10^6 bytes a second
    rounds: int  # at the disk's own speed
    throttled_rounds: int
    recompute_rounds: int  # 0: the first one after the restart counts
    raw_bytes: int
    mha: bool


QUICK = Sizes(
    tokens=2600,
    max_prefix=256,
    mbps=(125, 500),
    rounds=3,
    throttled_rounds=1,
    recompute_rounds=0,
    raw_bytes=128 << 20,
    mha=False,
)
FULL = Sizes(
    tokens=2600,
    max_prefix=4096,
    mbps=(125, 500),
    rounds=7,
    throttled_rounds=5,
    recompute_rounds=3,
    raw_bytes=512 << 20,
    mha=True,
)


Turns = dict[CheckpointMethod, list[Turn]]


class ModelRun:
    """All rows of one model."""

    def __init__(
        self, model_dir: Path, dtype: torch.dtype, sizes: Sizes, disk: RawDisk, directory: Path
    ) -> None:
        self.config: ModelConfig = read_model_config(model_dir)
        self.name = model_dir.name
        self.dtype, self.sizes, self.disk = dtype, sizes, disk
        tokenizer = ChatTokenizer(model_dir)
        self.chat = Chat(
            prefix=default_prefix_ids(tokenizer)[: sizes.max_prefix],
            history=text_ids(tokenizer, sizes.tokens, skip=11),
            new=tokenizer.user_ids("What was it that we talked about first?", first=False),
        )
        dtype_name = "bf16" if dtype == torch.bfloat16 else "fp32"
        self.sides = [
            Side(model_dir, dtype_name, method, directory / method, self.chat) for method in METHODS
        ]
        self.first: dict[CheckpointMethod, Turn] = {}  # after the restart
        self.kl: dict[CheckpointMethod, float] = {}
        self.plans: dict[CheckpointMethod, str] = {}  # the checkpoint of every layer
        self.turns: dict[int | None, Turns] = {}  # by throttled speed, None: the disk's own

    def run(self) -> None:
        """Save, restart, check and measure. Raises Refused."""
        with ExitStack() as stack:
            for side in self.sides:
                stack.callback(side.close)
            reference = self._save()
            self._restart(reference)
            for mbps in (None, *self.sizes.mbps):
                self.turns[mbps] = self._measure(mbps)
                self.disk.probe(2)

    def rows(self, peak: Peak) -> list[Row]:
        """A row for each disk speed and method."""
        return [
            self._row(side, mbps, turns, peak)
            for mbps, turns in self.turns.items()
            for side in self.sides
        ]

    def _save(self) -> Turn:
        kv_bytes = kv_bytes_per_token(self.config, self.dtype.itemsize)
        reference: Turn | None = None
        c = self.config
        kv_size = c.num_kv_heads * c.head_dim
        saved: dict[tuple[str, ...], Side] = {}  # by the methods of all layers
        for side in self.sides:
            plan = choose_plan(side.method, c.num_layers, c.hidden_size, kv_size).methods
            if plan in saved:
                side.copy(saved[plan])
                continue
            saved[plan] = side
            progress(f"{self.name}: saving {len(self.chat.history)} tokens, {side.method}")
            side.open(kv_bytes)
            side.save()
            if side.method == "recompute":
                reference = side.stay()
            side.close()
        assert reference is not None, "no method keeps the chat resident"
        return reference

    def _restart(self, reference: Turn) -> None:
        for side in self.sides:
            progress(f"{self.name}: restarting, {side.method}")
            side.open(kv_bytes_per_token(self.config, self.dtype.itemsize))
            self.plans[side.method] = side.engine.info.checkpoint_method
            side.warm_prefix()
            turn = side.resume(None)
            what = f"{self.name}, {side.method} after a restart"
            self.kl[side.method] = check_turn(what, turn, reference, self.dtype)
            self.first[side.method] = turn

    def _measure(self, mbps: int | None) -> Turns:
        progress(f"{self.name}: coming back, disk at {mbps or 'its own'} MB/s")
        rate = None if mbps is None else mbps * 1e6
        turns: Turns = {side.method: [] for side in self.sides}
        for number in range(self.sizes.rounds if rate is None else self.sizes.throttled_rounds):
            for side in self.sides if number % 2 else reversed(self.sides):
                if side.method != "recompute":
                    turns[side.method].append(side.resume(rate))
                elif mbps is None and number < self.sizes.recompute_rounds:
                    turns[side.method].append(side.resume(None))
        for method, taken in turns.items():
            for turn in taken:
                check_turn(f"{self.name}, {method}", turn, self.first[method], self.dtype)
        if mbps is not None:
            turns["recompute"] = self.turns[None]["recompute"]
        elif not turns["recompute"]:
            turns["recompute"] = [self.first["recompute"]]
        return turns

    def _row(self, side: Side, mbps: int | None, all_turns: Turns, peak: Peak) -> Row:
        turns, raw = all_turns[side.method], self.disk.bytes_per_s
        recompute_ms = statistics.median(t.ttft_ms for t in all_turns["recompute"])
        bandwidth = raw if mbps is None else min(raw, mbps * 1e6)
        costs = RestoreCosts.of(
            self.config,
            self.dtype.itemsize,
            peak.flops_per_s,
            bandwidth,
            prefix=len(self.chat.prefix),
            num_tokens=len(self.chat.history),
        )
        first = self.first[side.method].stats
        compute_s = first.restore_compute_ms / 1e3
        if side.method == "recompute":
            compute_s = side.recompute_s_per_token * len(self.chat.history)
        restore_ms = statistics.median(turn.restore_s for turn in turns) * 1e3
        ttft_ms = statistics.median(turn.ttft_ms for turn in turns)
        num_bytes = turns[-1].stats.restore_bytes
        used = self.plans[side.method]
        layers = [costs.num_layers * (used == name) for name in ("recompute", "hidden", "kv")]
        if sum(layers) != costs.num_layers:
            raise Refused(f"{side.method}: the plan {used!r} is of no kind that is known here")
        return {
            "model": self.name,
            "tokens": len(self.chat.history),
            "prefix": len(self.chat.prefix),
            "disk_mbps": round(bandwidth / 1e6),
            "throttled": mbps is not None,
            "method": side.method,
            "plan": f"{costs.num_layers} {used}",
            "restore_ms": round(restore_ms, 1),
            "ttft_ms": round(ttft_ms, 1),
            "bytes": num_bytes,
            "predicted_ms": round(max(num_bytes / bandwidth, compute_s) * 1e3, 1),
            "lower_bound_ms": round(costs.lower_bound() * 1e3, 1),
            "floor_share": round(costs.makespan(*layers) * 1e3 / restore_ms, 3),
            "io_ms": round(statistics.median(t.stats.restore_io_ms for t in turns), 1),
            "compute_ms": round(statistics.median(t.stats.restore_compute_ms for t in turns), 1),
            "first_ttft_ms": round(self.first[side.method].ttft_ms, 1),
            "ttft_vs_recompute": round(recompute_ms / ttft_ms, 2),
            "kl": float(f"{self.kl[side.method]:.2g}"),
        }


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    configure_torch()
    sizes = sizes or (QUICK if options.quick else FULL)
    dtype = resolve_dtype(options.dtype)
    about = machine.describe()
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="rejoinder-benchmark-"))
        directory = Path(name)
        progress("raw disk reads, memory bandwidth and GEMM peak")
        disk = RawDisk(directory, sizes.raw_bytes)
        stack.callback(disk.close)
        disk.probe(3)
        peak = machine.measure_peak(dtype, quick=options.quick)
        runs = [ModelRun(options.model_dir, dtype, sizes, disk, directory / "own")]
        runs[0].run()
        if sizes.mha:
            progress("making a random model with multi-head attention")
            mha = make_mha_model(directory, options.model_dir)
            runs.append(ModelRun(mha, dtype, sizes, disk, directory / "mha"))
            runs[1].run()
        peak = peak.better(machine.measure_peak(dtype, quick=options.quick))
        return {
            "model": options.model_name,
            "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
            "machine": about,
            "memory_gb_s": round(peak.bytes_per_s / 1e9, 1),
            "gemm_gflop_s": round(peak.flops_per_s / 1e9, 1),
            "raw_disk_mbps": round(disk.bytes_per_s / 1e6, 1),
            "raw_disk_direct": disk.direct,
            "rows": [row for one in runs for row in one.rows(peak)],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("resume", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

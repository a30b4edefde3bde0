"""Chats that come back after a restart: time to their first token by every restore method.

Each method has a data directory and an engine of its own; the engine that saves ends before the
one that resumes starts. `auto` has one for each disk speed, told that speed (its own as measured
through the chunk store), so that its planner chooses for it. The shared prefix is brought back
first, as a running server has it; then a chat comes back cold, in rounds that take the methods in
turn, at the disk's own speed and throttled. Every first answer after the restart is compared with
that of a chat that was never evicted, every later one with the first.

`restore_ms`: until the history's K/V are back; `ttft_ms`: the returning turn's first token, from
the engine's receipt. `plan`: how many layers came back in which way, from the stripes that were
read. `predicted_ms`: what the planner predicted for them before they were read; for the methods
that are not planned, what the same cost model says of their layers. `lower_bound_ms`: the best plan
by brute force at the packed-GEMM peak of this run and the raw bandwidth: the median of raw passes
that took turns with the restores (`raw_disk_mbps`: the best of the whole run). `floor_share` is the
same bound for the row's own layers over its `restore_ms`. `recompute` reads nothing: it is measured
at the disk's own speed only, and its rows at other speeds repeat that figure (`--quick`: that after
the restart). `warm_ups`: the first token after a warm-up from a cold disk (the page of the chat was
opened) over that of the same chat while it is resident.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.floors import RestoreCosts, kv_bytes_per_token
from benchmarks.geometry import make_mha_model
from benchmarks.machine import Peak, RawDisk
from benchmarks.profiling import measure_store, settle, throttled
from benchmarks.report import Options, Row, progress, run
from benchmarks.restored import floor_s, plan_text
from benchmarks.resume_sizes import FULL, QUICK, Sizes
from benchmarks.resuming import Chat, Return, Side, Turn, check_turn, one_copy_of_weights
from benchmarks.texts import default_prefix_ids, text_ids
from engine.config import CheckpointMethod, EngineConfig
from engine.devices import resolve_dtype
from engine.model.model_config import ModelConfig, read_model_config
from engine.model.tokenizer import ChatTokenizer
from engine.profile.record import DiskRead
from engine.restoration.plan import RestoredPart
from engine.restoration.planner import Planner
from kernels.threading import configure_torch

Speed = int | None  # 10^6 bytes a second, throttled; None: the disk's own


class ModelRun:
    """All rows of one model."""

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        tokens: Sequence[int],
        sizes: Sizes,
        raw: RawDisk,
        store: DiskRead,
        directory: Path,
    ) -> None:
        """store: reads of a chunk store below `directory`."""
        self.config: ModelConfig = read_model_config(model_dir)
        self.name = model_dir.name
        self.dtype, self.sizes, self.raw = dtype, sizes, raw
        self.speeds: tuple[Speed, ...] = (None, *sizes.mbps)
        tokenizer = ChatTokenizer(model_dir)
        prefix = default_prefix_ids(tokenizer)[: sizes.max_prefix]
        new = tokenizer.user_ids("What was it that we talked about first?", first=False)
        self.chats = [
            Chat(prefix, text_ids(tokenizer, count, skip=11 * i), new)
            for i, count in enumerate(tokens, start=1)
        ]

        def side(method: CheckpointMethod, speed: Speed = None) -> Side:
            name = method if speed is None else f"{method} for {speed} MB/s"
            config = EngineConfig(
                model_dir=str(model_dir),
                model_name=model_dir.name,
                dtype="bf16" if dtype == torch.bfloat16 else "fp32",
                checkpoint_method=method,
                share_prefix="always",  # nobody is there to share with
                profile_path=str(directory / "profile.json"),
                disk=throttled(store, speed and speed * 1e6),
            )
            return Side(name, directory / name.replace("/", "-"), config, self.config.num_layers)

        self.recompute, self.kv, self.hidden = side("recompute"), side("kv"), side("hidden")
        self.auto = {speed: side("auto", speed) for speed in self.speeds}
        self.first: dict[tuple[Side, str], Return] = {}  # after the restart
        self.kl: dict[tuple[Side, str], float] = {}
        self.turns: dict[tuple[Speed, str, Side], list[Return]] = {}
        self.raw_rates: dict[str, list[float]] = {}  # bytes/s, taken between a chat's restores

    def run(self) -> None:
        """Save, restart, check and measure. Raises Refused."""
        with ExitStack() as stack:
            stack.enter_context(one_copy_of_weights())
            for side in self._sides():
                stack.callback(side.close)
            references = self._save()
            self._restart(references)
            self.planners = {speed: self._planner(self.auto[speed]) for speed in self.speeds}
            for speed in self.speeds:
                for chat in self.chats:
                    self._measure(speed, chat)
                self.raw.probe(2)
            self.warm_ups = [self._warm_up(chat) for chat in self.chats]

    def rows(self, peak: Peak) -> list[Row]:
        """A row for each disk speed, history and method."""
        return [
            self._row(speed, chat, side, peak)
            for speed in self.speeds
            for chat in self.chats
            for side in self._sides_at(speed)
        ]

    def _warm_up(self, chat: Chat) -> Row:
        """First tokens after a warm-up beside those of the same chat while it is resident."""
        side = self.auto[None]
        pairs = [side.warmed(chat) for _ in range(self.sizes.rounds)]
        for turn, _ in pairs:
            what = f"{self.name}, {chat.id}, warmed"
            check_turn(what, turn, self.first[side, chat.id], self.dtype)
        warmed = [pair[0].ttft_ms for pair in pairs]
        resident = [pair[1].ttft_ms for pair in pairs]
        ratios = [after / stayed for after, stayed in zip(warmed, resident, strict=True)]
        return {
            "model": self.name,
            "tokens": len(chat.history),
            "warmed_ttft_ms": round(statistics.median(warmed), 1),
            "resident_ttft_ms": round(statistics.median(resident), 1),
            "ratio": round(statistics.median(ratios), 3),
        }

    def _sides(self) -> list[Side]:
        return [self.recompute, self.kv, self.hidden, *self.auto.values()]

    def _sides_at(self, speed: Speed) -> list[Side]:
        return [self.recompute, self.kv, self.hidden, self.auto[speed]]

    def _planner(self, side: Side) -> Planner:
        plans = side.engine.plans
        assert isinstance(plans, Planner), f"{side.name} has no figures to plan from"
        return plans

    def _save(self) -> dict[str, Turn]:
        """What every method must answer, by chat. `recompute` has nothing to save."""
        references: dict[str, Turn] = {}
        for side in (self.kv, self.hidden, *self.auto.values()):
            progress(f"{self.name}: saving, {side.name}")
            side.open(self.chats, kv_bytes_per_token(self.config, self.dtype.itemsize))
            self.weights = side.engine.info.weights
            if side is self.auto[None]:
                self.undisturbed = settle(side.config, self.config)
            references |= side.save(self.chats, stay=side is self.kv)
            side.close()
        return references

    def _restart(self, references: dict[str, Turn]) -> None:
        for side in self._sides():
            progress(f"{self.name}: restarting, {side.name}")
            side.open(self.chats, kv_bytes_per_token(self.config, self.dtype.itemsize))
            side.warm_prefix(self.chats[0])
            for chat in self.chats:
                turn = side.resume(chat, None)
                what = f"{self.name}, {chat.id}, {side.name} after a restart"
                self.kl[side, chat.id] = check_turn(what, turn, references[chat.id], self.dtype)
                self.first[side, chat.id] = turn

    def _measure(self, speed: Speed, chat: Chat) -> None:
        progress(f"{self.name}: {chat.id}, disk at {speed or 'its own'} MB/s")
        rate = None if speed is None else speed * 1e6
        sides = self._sides_at(speed)
        turns: dict[Side, list[Return]] = {side: [] for side in sides}
        rates = self.raw_rates.setdefault(chat.id, [])
        for number in range(self.sizes.rounds if speed is None else self.sizes.throttled_rounds):
            if speed is None:
                rates.append(self.raw.rate())
            for side in sides if number % 2 else reversed(sides):
                if side is not self.recompute:
                    turns[side].append(side.resume(chat, rate))
                elif speed is None and number < self.sizes.recompute_rounds:
                    turns[side].append(side.resume(chat, None))
        for side, taken in turns.items():
            for turn in taken:
                what = f"{self.name}, {chat.id}, {side.name}"
                check_turn(what, turn, self.first[side, chat.id], self.dtype)
            self.turns[speed, chat.id, side] = taken
        if speed is not None:
            again = self.turns[None, chat.id, self.recompute]
            self.turns[speed, chat.id, self.recompute] = again
        elif not turns[self.recompute]:
            self.turns[None, chat.id, self.recompute] = [self.first[self.recompute, chat.id]]

    def _row(self, speed: Speed, chat: Chat, side: Side, peak: Peak) -> Row:
        turns, raw = self.turns[speed, chat.id, side], statistics.median(self.raw_rates[chat.id])
        recomputed = self.turns[speed, chat.id, self.recompute]
        bandwidth = raw if speed is None else min(raw, speed * 1e6)
        whole = RestoredPart(len(chat.prefix), len(chat.history), 0, 0, 0, 0)
        restore_ms = statistics.median(turn.restore_s for turn in turns) * 1e3
        ttft_ms = statistics.median(turn.ttft_ms for turn in turns)
        last = turns[-1]
        predicted_ms = last.stats.restore_predicted_ms
        if predicted_ms is None:
            predicted_ms = self.planners[speed].predict(last.parts).total_ms
        floor_ms = (
            floor_s([(self._costs(part, peak, bandwidth), part) for part in last.parts]) * 1e3
        )
        return {
            "model": self.name,
            "tokens": len(chat.history),
            "prefix": len(chat.prefix),
            "disk_mbps": round(bandwidth / 1e6),
            "throttled": speed is not None,
            "method": side.method,
            "plan": plan_text(last.parts),
            "restore_ms": round(restore_ms, 1),
            "ttft_ms": round(ttft_ms, 1),
            "bytes": last.stats.restore_bytes,
            "predicted_ms": round(predicted_ms, 2),
            "lower_bound_ms": round(self._costs(whole, peak, bandwidth).lower_bound() * 1e3, 2),
            "floor_share": round(floor_ms / restore_ms, 3),
            "io_ms": round(statistics.median(t.stats.restore_io_ms for t in turns), 1),
            "compute_ms": round(statistics.median(t.stats.restore_compute_ms for t in turns), 1),
            "first_ttft_ms": round(self.first[side, chat.id].ttft_ms, 1),
            "ttft_vs_recompute": round(
                statistics.median(t.ttft_ms for t in recomputed) / ttft_ms, 2
            ),
            "kl": float(f"{self.kl[side, chat.id]:.2g}"),
        }

    def _costs(self, part: RestoredPart, peak: Peak, bytes_per_s: float) -> RestoreCosts:
        return RestoreCosts.of(
            self.config,
            self.dtype.itemsize,
            peak.flops_per_s,
            bytes_per_s,
            prefix=part.start,
            num_tokens=part.num_tokens,
        )


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
        raw = RawDisk(directory, sizes.raw_bytes)
        stack.callback(raw.close)
        raw.probe(3)
        peak = machine.measure_peak(dtype, quick=options.quick)
        store = measure_store(directory / "measured")
        own = directory / "own"
        runs = [ModelRun(options.model_dir, dtype, sizes.tokens, sizes, raw, store, own)]
        runs[0].run()
        if sizes.mha_tokens:
            progress("making a random model with multi-head attention")
            model = make_mha_model(directory, options.model_dir)
            mha = directory / "mha"
            runs.append(ModelRun(model, dtype, sizes.mha_tokens, sizes, raw, store, mha))
            runs[1].run()
        peak = peak.better(machine.measure_peak(dtype, quick=options.quick))
        return {
            "model": options.model_name,
            "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
            "weights": runs[0].weights,
            "machine": about,
            "memory_gb_s": round(peak.bytes_per_s / 1e9, 1),
            "gemm_gflop_s": round(peak.flops_per_s / 1e9, 1),
            "raw_disk_mbps": round(raw.bytes_per_s / 1e6, 1),
            "raw_disk_direct": raw.direct,
            "store_mbps": round(store.bytes_per_s / 1e6, 1),  # what the own-speed plan rests on
            "profile_undisturbed": round(min(one.undisturbed for one in runs), 2),
            "rows": [row for one in runs for row in one.rows(peak)],
            "warm_ups": [row for one in runs for row in one.warm_ups],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("resume", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

"""What restores cost those who are being answered, and what answers cost the restores.

Chats decode; others, on disk and cold, are brought back one after another without a pause. Rounds
with restores and rounds without alternate. `p99_itl_ratio`: the 99th percentile of the gaps between
tokens that overlap restores over that of the gaps without; `restore_rate_ratio`: tokens restored a
second beside the decoding chats over that of an idle engine. Every restore must bring all tokens
back.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.machine import drop_from_page_cache
from benchmarks.profiling import Profile
from benchmarks.report import Options, Refused, Row, progress, run
from benchmarks.stepping import SteppedEngine, pages_of
from benchmarks.texts import text_ids
from engine.config import CheckpointMethod
from engine.devices import resolve_dtype
from engine.memory.kv_cache import KVCache
from engine.model.model_config import read_model_config
from engine.model.tokenizer import ChatTokenizer
from engine.request import percentile
from kernels.threading import configure_torch

METHODS: tuple[CheckpointMethod, ...] = ("auto", "hidden")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; lengths in tokens."""

    running: int
    prompt: int  # of a running chat
    idle: int  # chats on disk
    tokens: int  # of each
    rounds: int
    gaps: int  # of a round, at least
    restores: int  # of an idle engine


QUICK = Sizes(running=8, prompt=200, idle=2, tokens=1500, rounds=2, gaps=60, restores=4)
FULL = Sizes(running=8, prompt=200, idle=3, tokens=4000, rounds=5, gaps=200, restores=9)


class Restores:
    """Brings chats on disk back, one after another, for as long as it is asked to."""

    def __init__(
        self, side: SteppedEngine, chats: Sequence[tuple[str, list[int]]], directory: Path
    ) -> None:
        self._side = side
        self._chats = itertools.cycle(chats)
        self._directory = directory
        self._current: tuple[str, list[int]] | None = None
        self.tokens = 0  # that came back so far
        self.count = 0

    def go_on(self) -> None:
        """Begin the next restore if the last one has ended. Raises Refused if it lost something."""
        if self._current is not None:
            chat_id, ids = self._current
            if self._side.restoring(chat_id):
                return
            if self._side.restored(chat_id) < len(ids):
                raise Refused(f"{self._side.restored(chat_id)} of {len(ids)} tokens came back")
            self.tokens += len(ids)
            self.count += 1
        self._current = next(self._chats)
        drop_from_page_cache(self._directory)
        self._side.warm(*self._current)

    def finish(self) -> None:
        """Let the last one end."""
        while self._current is not None and self._side.restoring(self._current[0]):
            self._side.step()
        self._current = None


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    configure_torch()
    sizes = sizes or (QUICK if options.quick else FULL)
    dtype = resolve_dtype(options.dtype)
    rows = [_method(options, sizes, dtype, method) for method in METHODS]
    return {
        "model": options.model_name,
        "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
        "machine": machine.describe(),
        "rows": rows,
        "p99_itl_ratio": max(row["p99_itl_ratio"] for row in rows),
        "restore_rate_ratio": min(row["restore_rate_ratio"] for row in rows),
    }


def _method(options: Options, sizes: Sizes, dtype: torch.dtype, method: CheckpointMethod) -> Row:
    config = read_model_config(options.model_dir)
    tokenizer = ChatTokenizer(options.model_dir)
    idle = [(f"idle{i}", text_ids(tokenizer, sizes.tokens, skip=53 * i)) for i in range(sizes.idle)]
    running = [
        (f"running{i}", text_ids(tokenizer, sizes.prompt, skip=31 * i))
        for i in range(sizes.running)
    ]
    steps = 40 * sizes.gaps * sizes.rounds  # more than will be taken
    room = min(steps, config.max_position_embeddings - sizes.prompt)
    pages = pages_of([sizes.prompt + room] * sizes.running + [sizes.tokens] * (sizes.idle + 1))
    page_bytes = KVCache.bytes_per_page(
        config.num_layers, config.num_kv_heads, config.head_dim, dtype
    )
    with tempfile.TemporaryDirectory(prefix="rejoinder-benchmark-") as name:
        directory = Path(name) / "chats"
        directory.mkdir()
        side = SteppedEngine(
            options.model_dir,
            "bf16" if dtype == torch.bfloat16 else "fp32",
            method,
            directory,
            pages,
            page_bytes,
            Profile.begin(Path(name)),
        )
        plan = side.engine.info.checkpoint_method
        with closing(side):
            for chat in idle:
                side.begin([chat])
                side.end()
            restores = Restores(side, idle, directory)
            alone = _rate(restores, side, sizes.restores)
            side.begin(running)
            with_s, without_s, beside = _rounds(restores, side, sizes)
            side.end()
    return {
        "method": method,
        "plan": plan,
        "running": sizes.running,
        "tokens": sizes.tokens,
        "p99_itl_ms": round(1e3 * percentile(with_s, 99), 2),
        "p99_itl_without_ms": round(1e3 * percentile(without_s, 99), 2),
        "p99_itl_ratio": round(percentile(with_s, 99) / percentile(without_s, 99), 3),
        "p50_itl_ratio": round(statistics.median(with_s) / statistics.median(without_s), 3),
        "restore_tok_s": round(beside),
        "idle_restore_tok_s": round(alone),
        "restore_rate_ratio": round(beside / alone, 3),
    }


def _rate(restores: Restores, side: SteppedEngine, count: int) -> float:
    """Tokens restored a second by an engine that does nothing else."""
    began, tokens, end = time.perf_counter(), restores.tokens, restores.count + count
    while restores.count < end:
        restores.go_on()
        side.step()
    seconds = time.perf_counter() - began
    rate = (restores.tokens - tokens) / seconds
    restores.finish()
    return rate


def _rounds(
    restores: Restores, side: SteppedEngine, sizes: Sizes
) -> tuple[list[float], list[float], float]:
    """Gaps with restores and without, seconds, and the restores' tokens a second."""
    with_s: list[float] = []
    without_s: list[float] = []
    rates: list[float] = []
    for number in range(sizes.rounds):
        progress(f"round {number + 1} of {sizes.rounds}")
        began, tokens, taken = time.perf_counter(), restores.tokens, 0
        first = restores.count
        while taken < sizes.gaps or restores.count == first:
            restores.go_on()
            with_s.append(side.step())
            taken += 1
        rates.append((restores.tokens - tokens) / (time.perf_counter() - began))
        restores.finish()
        without_s.extend(side.step() for _ in range(sizes.gaps))
    return with_s, without_s, statistics.median(rates)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("interference", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

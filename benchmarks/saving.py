"""What checkpointing costs those who are being answered: the gap between tokens, on over off.

Engines with the same model, one that saves nothing and one for each method, decode the same chats
in rounds of 64 steps that alternate, so that every chat fills one stripe a round. The writer ends
what it has between rounds, so that no side pays for another. `ratio`: the median over the rounds of
the mean step with saving over that without; `p95_ratio` the same of the 95th percentile. `plan` is
what chats of these lengths are saved by, for `auto` by the planner's choice for this machine.
`itl_ratio` is the worst ratio of all rows. Refused when a stripe was dropped, or when what lies on
disk is not what the tokens come to.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.profiling import Profile
from benchmarks.report import Options, Refused, Row, progress, run
from benchmarks.stepping import SteppedEngine, pages_of
from benchmarks.texts import text_ids
from engine.config import CheckpointMethod
from engine.devices import resolve_dtype
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.model.model_config import read_model_config
from engine.model.tokenizer import ChatTokenizer
from engine.request import percentile
from kernels.threading import configure_torch

METHODS: tuple[CheckpointMethod, ...] = ("auto", "hidden")
STRIPE_OVERHEAD = 8 << 10  # bytes: a stripe's header, and its end's alignment


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    batches: tuple[int, ...]
    rounds: int
    steps: int  # of a round; the first round is not counted


QUICK = Sizes(batches=(1, 8, 32), rounds=2, steps=64)
FULL = Sizes(batches=(1, 8, 32), rounds=6, steps=64)


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    configure_torch()
    sizes = sizes or (QUICK if options.quick else FULL)
    dtype = resolve_dtype(options.dtype)
    with tempfile.TemporaryDirectory(prefix="rejoinder-benchmark-") as name:
        profile = Profile.begin(Path(name))
        rows = [
            row for batch in sizes.batches for row in _batch(options, sizes, dtype, batch, profile)
        ]
    return {
        "model": options.model_name,
        "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
        "machine": machine.describe(),
        "rows": rows,
        "itl_ratio": max(row["ratio"] for row in rows),
    }


def _batch(
    options: Options, sizes: Sizes, dtype: torch.dtype, batch: int, profile: Profile
) -> list[Row]:
    """All methods with so many chats."""
    config = read_model_config(options.model_dir)
    tokenizer = ChatTokenizer(options.model_dir)
    # prompts of all lengths within a page, so that stripes fill in turn
    lengths = [PAGE_SIZE + PAGE_SIZE * i // batch for i in range(batch)]
    chats = [
        (f"chat{i}", text_ids(tokenizer, length, skip=31 * i)) for i, length in enumerate(lengths)
    ]
    total = (sizes.rounds + 1) * sizes.steps + 2
    pages = pages_of([length + total for length in lengths])
    page_bytes = KVCache.bytes_per_page(
        config.num_layers, config.num_kv_heads, config.head_dim, dtype
    )
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    with ExitStack() as open_:
        parent = Path(
            open_.enter_context(tempfile.TemporaryDirectory(prefix="rejoinder-benchmark-"))
        )
        sides: dict[CheckpointMethod | None, SteppedEngine] = {}
        for method in (None, *METHODS):
            directory = None if method is None else parent / method
            if directory is not None:
                directory.mkdir()
            side = SteppedEngine(
                options.model_dir, name, method or "auto", directory, pages, page_bytes, profile
            )
            sides[method] = open_.enter_context(closing(side))
        steps = _alternate(sides, chats, sizes, batch)
        for method in METHODS:
            _check_saved(method, sides[method])
        plans = {method: sides[method].engine.info.checkpoint_method for method in METHODS}
    return [_row(method, plans[method], batch, steps[None], steps[method]) for method in METHODS]


def _alternate(
    sides: dict[CheckpointMethod | None, SteppedEngine],
    chats: Sequence[tuple[str, list[int]]],
    sizes: Sizes,
    batch: int,
) -> dict[CheckpointMethod | None, list[list[float]]]:
    """Seconds of every step of every round, by side; ends with all of it on disk."""
    steps: dict[CheckpointMethod | None, list[list[float]]] = {name: [] for name in sides}
    for side in sides.values():
        side.begin(chats)
        side.flush()
    order = list(sides)
    for number in range(sizes.rounds + 1):
        progress(f"batch {batch}, round {number} of {sizes.rounds}")
        for name in order if number % 2 else order[::-1]:
            taken = [sides[name].step() for _ in range(sizes.steps)]
            sides[name].flush()
            if number:
                steps[name].append(taken)
    for side in sides.values():
        side.end()
    return steps


def _check_saved(method: str, side: SteppedEngine) -> None:
    stats = side.engine.stats()
    if stats.stripes_dropped:
        raise Refused(f"{method}: {stats.stripes_dropped} stripes were dropped")
    expected = side.tokens_held() * side.engine.info.bytes_per_token_checkpoint
    most = expected + stats.stripes_written * STRIPE_OVERHEAD
    if not expected <= stats.disk_bytes <= most:
        raise Refused(
            f"{method}: {stats.disk_bytes} bytes are on disk; {expected} to {most} were expected"
        )


def _row(method: str, plan: str, batch: int, off: list[list[float]], on: list[list[float]]) -> Row:
    def ratio(figure: str) -> float:
        pairs = zip(on, off, strict=True)
        if figure == "mean":
            return statistics.median(statistics.mean(a) / statistics.mean(b) for a, b in pairs)
        return statistics.median(percentile(a, 95) / percentile(b, 95) for a, b in pairs)

    return {
        "method": method,
        "plan": plan,
        "batch": batch,
        "off_ms": round(1e3 * statistics.mean(map(statistics.mean, off)), 3),
        "on_ms": round(1e3 * statistics.mean(map(statistics.mean, on)), 3),
        "ratio": round(ratio("mean"), 4),
        "p95_ratio": round(ratio("p95"), 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("saving", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

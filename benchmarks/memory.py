"""What an engine process holds in memory, against what it cannot do without.

A process for each format of the weights loads the model and has `chats` decode below one shared
prefix of `prefix` tokens. `needed_mib`: weights as that format packs them, the embedding, the K/V
of the pages in use, and 300 MiB for Python, torch and buffers. `ratio`: resident memory over that,
at the end of the steps; `peak_ratio` the same of the most that was ever resident.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks import machine
from benchmarks.floors import Precision, layer_params
from benchmarks.report import Options, Row, progress, run
from benchmarks.step import SAMPLERS, Sizes, Steps, null_sender
from engine.chunking import ChunkSize
from engine.config import EngineConfig
from engine.devices import resolve_dtype
from engine.free_memory import settle_memory
from engine.model.geometry import ModelConfig
from engine.model.model_config import read_model_config
from kernels.threading import configure_environment, configure_torch
from sessions.chunks import ChunkStore

ALLOWED = 300 << 20  # bytes, for all but weights and K/V
QUICK = Sizes((32,), (2048,), ("greedy",), 40, 60.0, (256,))
FULL = Sizes((8, 32, 64), (4096,), ("greedy",), 128, 60.0, (256,))


def weight_bytes(config: ModelConfig, format: str, item_bytes: int) -> float:
    """Projections and head in their format, the embedding in the dtype.

    In the dtype's own format a tied head is a copy too, laid out for its products.
    """
    table = config.vocab_size * config.hidden_size
    packed = config.num_layers * layer_params(config) + table
    return packed * Precision.of(format, item_bytes).weight_bytes + table * item_bytes


def measure(options: Options) -> Row:
    """Run it; returns the result."""
    configure_environment()  # for the processes that are started
    sizes = QUICK if options.quick else FULL
    formats = [options.extra.weights] if options.extra.weights else ["int4", "bf16"]
    rows: list[Row] = []
    for format in formats:
        for batch in sizes.batches:
            progress(f"{format}, {batch} chats")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(_one, (options, format, batch, sizes)))
    return {
        "model": options.model_name,
        "machine": machine.describe(),
        "rows": rows,
        "ratio": max(row["ratio"] for row in rows),
    }


def _one(options: Options, format: str, batch: int, sizes: Sizes) -> Row:
    """In a process of its own: one engine, one batch."""
    configure_torch()
    options.extra.weights = format
    dtype = resolve_dtype(options.dtype)
    config = read_model_config(options.model_dir)
    prefix = max(sizes.prefixes)
    with tempfile.TemporaryDirectory() as directory, null_sender() as out:
        store = ChunkStore([Path(directory)], cap_bytes=4 << 30)
        steps = Steps(options, config, sizes, store, out)
        steps.engine.scheduler.chunk = ChunkSize(
            EngineConfig(model_dir="", model_name="").prefill_chunk
        )  # a server's, unlike what the steps are timed with
        settle_memory()  # as the engine process does once it is loaded
        steps.begin(batch, prefix, SAMPLERS["greedy"])
        for _ in range(sizes.steps):
            steps.step()
        stats = steps.engine.stats()
        pages = stats.pages_total - stats.pages_free
        resident = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        info = steps.engine.info
        steps.engine.close()
        store.close()
    kv_bytes = pages * info.page_size * info.bytes_per_token_kv
    weights = weight_bytes(config, format, dtype.itemsize)
    needed = weights + kv_bytes + ALLOWED
    return {
        "weights": format,
        "chats": batch,
        "prefix": prefix,
        "weights_mib": round(weights / 2**20, 1),
        "kv_mib": round(kv_bytes / 2**20, 1),
        "needed_mib": round(needed / 2**20, 1),
        "resident_mib": round(resident / 2**20, 1),
        "peak_mib": round(peak / 2**20, 1),
        "ratio": round(resident / needed, 3),
        "peak_ratio": round(peak / needed, 3),
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", choices=["bf16", "fp32", "int8", "int4"], help="one format alone"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("memory", __doc__, measure, argv, _add_options)


if __name__ == "__main__":
    sys.exit(main())

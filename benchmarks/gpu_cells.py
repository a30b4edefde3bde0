"""The sizes at which decoding is compared on a CUDA device, each checked before it is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.gpu_attention import Differ
from benchmarks.gpu_decode import SUFFIX, FlashSide, Steps, fitting_layers, make_weights
from benchmarks.gpu_lab import Lab, Row
from benchmarks.gpu_model import CODELLAMA_13B, LLAMA_2_7B, TINY, weight_bytes
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.model.geometry import ModelConfig

MAX_DIFFERENCE = 0.05  # of bf16 logits after all layers, relative to their norm
STEPS = 6  # of a side in a round
ROUNDS = 5
SIDE_SECONDS = 1.5  # of a side in one cell, after which no further step is begun
CHECKED = (1000, 5)  # prefix and batch whose logits are compared: no page's end, not a graph's size
NO_ROOM = "does not fit"


@dataclass(frozen=True)
class Sweep:
    """What is run: models, and (prefix, batch) in order of importance."""

    models: tuple[tuple[str, ModelConfig], ...]
    cells: tuple[tuple[int, int], ...]
    checked: tuple[int, int]

    @property
    def limits(self) -> tuple[int, int]:
        """The longest prefix and the largest batch."""
        return max(p for p, _ in self.cells), max(b for _, b in self.cells)


FULL = Sweep(
    models=(("Llama-2-7B shape", LLAMA_2_7B), ("CodeLlama-13B shape", CODELLAMA_13B)),
    cells=tuple((p, b) for p in (1024, 16384, 4096, 2048, 8192) for b in (1024, 32, 128, 512)),
    checked=CHECKED,
)
SMALL = Sweep(
    models=(("tiny", replace(TINY, num_kv_heads=2)),),
    cells=((64, 2), (130, 2)),
    checked=(70, 3),
)


def check(steps: Steps, prefix: int, batch: int) -> float:
    """Compare all sides' logits: the largest relative difference to flash. Raises Differ."""
    steps.begin(prefix, batch)
    expected = FlashSide(steps, one_layer=False)
    expected.replay()
    worst = 0.0
    for side in ("shared", "unshared"):
        for graphed in (True, False) if steps.lab.is_cuda else (True,):
            steps.begin(prefix, batch)
            runner = steps.runners[side]
            graphs = runner.graphs
            if not graphed:
                runner.graphs = None
            _, logits = steps.step(side)
            runner.graphs = graphs
            difference = float((logits - expected.logits).norm() / expected.logits.norm())
            worst = max(worst, difference)
            if not difference <= MAX_DIFFERENCE:
                how = "a graph" if graphed else "single launches"
                raise Differ(
                    f"logits of {side} decoding by {how} differ from those of flash attention by "
                    f"{difference:.2g} of their norm (prefix {prefix}, batch {batch})"
                )
    return worst


def model_rows(
    lab: Lab, name: str, config: ModelConfig, sweep: Sweep, deadline: float
) -> Iterator[Row | str]:
    """Rows of figures and lines of text, of one model; no cell is begun after the deadline.

    Raises Differ before anything is timed when the sides' logits differ.
    """
    max_prefix, max_batch = sweep.limits
    layers = fitting_layers(lab, config, max_prefix, max_batch)
    while layers < 2 and max_batch > 32:
        max_batch //= 2
        layers = fitting_layers(lab, config, max_prefix, max_batch)
    if layers < 2:
        yield f"{name}: {NO_ROOM}"
        return
    if layers < config.num_layers:
        yield f"{name}: {layers} of its {config.num_layers} layers, so that it fits"
    weights = make_weights(lab, replace(config, num_layers=layers))
    steps = Steps(lab, weights, max_prefix, max_batch)
    worst = check(steps, *sweep.checked)
    yield f"{name}: logits of all sides agree to {worst:.1%} of their norm"
    for prefix, batch in sweep.cells:
        if batch > max_batch:
            yield f"{name}: prefix {prefix}, batch {batch}: {NO_ROOM}"
        elif time.perf_counter() > deadline:
            yield f"{name}: prefix {prefix}, batch {batch}: skipped, no time is left"
        else:
            yield _cell(steps, name, prefix, batch)


def _cell(steps: Steps, name: str, prefix: int, batch: int) -> Row:
    steps.begin(prefix, batch)
    flash, how = _flash(steps, prefix, batch)
    seconds = _alternate(steps, flash)
    rates = {side: batch / statistics.median(times) for side, times in seconds.items()}
    flash_rate = rates.get("flash")
    return {
        "model": name,
        "layers": steps.weights.config.num_layers,
        "prefix": prefix,
        "batch": batch,
        "shared_tok_s": round(rates["shared"], 1),
        "unshared_tok_s": round(rates["unshared"], 1),
        "flash_tok_s": round(flash_rate, 1) if flash_rate else None,
        "over_unshared": round(rates["shared"] / rates["unshared"], 2),
        "over_flash": round(rates["shared"] / flash_rate, 2) if flash_rate else None,
        "flash_kv": how,
        "floor_share": round(_floor_s(steps, prefix, batch) * rates["shared"] / batch, 3),
        "least_steps": min(map(len, seconds.values())),
    }


def _alternate(steps: Steps, flash: FlashSide | None) -> dict[str, list[float]]:
    """Seconds of steps of each side, round after round, after one that captures it."""
    sides: dict[str, Callable[[], float]] = {
        "shared": lambda: steps.step("shared")[0],
        "unshared": lambda: steps.step("unshared")[0],
    }
    if flash is not None:
        sides["flash"] = flash.step
    limit = SIDE_SECONDS if steps.lab.is_cuda else 0.0
    for run in sides.values():
        run()
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, run in sides.items():
            steps.rewind()
            for _ in range(STEPS):
                if not seconds[side] or sum(seconds[side]) < limit:
                    seconds[side].append(run())
    steps.rewind()
    return seconds


def _flash(steps: Steps, prefix: int, batch: int) -> tuple[FlashSide | None, str]:
    """With K/V of its own for every layer if they fit, else of one layer for all, else None."""
    free = 0.8 * steps.lab.free_bytes()
    for layers, how in ((steps.weights.config.num_layers, "all layers"), (1, "one layer")):
        if FlashSide.bytes_needed(steps, prefix, batch, layers) <= free:
            return FlashSide(steps, one_layer=layers == 1), how
    return None, NO_ROOM


def _floor_s(steps: Steps, prefix: int, batch: int) -> float:
    """Seconds of a shared step at the roofs: all weights, the prefix once, each suffix once."""
    c, lab = steps.weights.config, steps.lab
    page = KVCache.bytes_per_page(c.num_layers, c.num_kv_heads, c.head_dim, lab.dtype)
    kv = (prefix + batch * SUFFIX) * page / PAGE_SIZE
    weights = weight_bytes(c, 1) - c.vocab_size * c.hidden_size  # the embedding is looked up
    attention = 4.0 * c.num_layers * c.num_heads * c.head_dim * (prefix + SUFFIX)
    return lab.floor_s(weights * lab.dtype.itemsize + kv, batch * (2.0 * weights + attention))


def losses(rows: list[Row]) -> list[Row]:
    """How much of the throughput at the shortest prefix is lost at the longest, by side."""
    result: list[Row] = []
    for model, batch in sorted({(row["model"], row["batch"]) for row in rows}):
        own = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        short = min(own, key=lambda row: int(row["prefix"]))
        long = max(own, key=lambda row: int(row["prefix"]))
        loss: Row = {"model": model, "batch": batch, "from": short["prefix"], "to": long["prefix"]}
        for side in ("shared", "unshared", "flash"):
            before, after = (row[f"{side}_tok_s"] for row in (short, long))
            loss[f"{side}_loss"] = round(1 - after / before, 3) if before and after else None
        result.append(loss)
    return result

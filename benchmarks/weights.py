"""Formats of weights: what each keeps of the model's answers, and what a step's projections cost.

Quality is taken on a fixed text (what a server judges by at a model's first start): the loss over
that of fp32, and the share of positions whose likeliest next token is fp32's. Times: all layers'
projections and the head, one after another, the formats in turn in every round, medians, seconds of
the main thread (what other programs take of the machine counts as little as possible). `ratio`:
times faster than the dtype's own format. `verdict`: whether `--weights auto` takes the format here.
"""

from __future__ import annotations

import statistics
import sys

from benchmarks import machine
from benchmarks.report import Options, Refused, Row, progress, run
from engine.devices import resolve_dtype
from engine.model.model_config import read_model_config
from engine.model.tokenizer import ChatTokenizer
from engine.model.weight_loading import open_tensors
from engine.profile.formats import ROWS as CHOICE_ROWS
from engine.profile.formats import measure_formats
from engine.profile.sample_text import SAMPLE_TEXT
from engine.profile.weight_figures import WeightFigures
from kernels.quantised import warm_up as warm_up_quantised
from kernels.threading import configure_torch
from kernels.warm_up import warm_up

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512)
MIN_TOKENS, MAX_TOKENS = 1024, 1536


def measure(options: Options) -> Row:
    """Run it; returns the result. Raises Refused when the text is too short for this tokenizer."""
    configure_torch()
    dtype = resolve_dtype(options.dtype)
    config = read_model_config(options.model_dir)
    warm_up(dtype, config.head_dim)
    warm_up_quantised(dtype)
    ids = ChatTokenizer(options.model_dir).encode_text(SAMPLE_TEXT)[:MAX_TOKENS]
    if len(ids) < MIN_TOKENS:
        raise Refused(f"the text has {len(ids)} tokens, of {MIN_TOKENS} that it takes")
    progress(f"{len(ids)} tokens through every format of {options.model_name}")
    figures = measure_formats(
        open_tensors(options.model_dir, config),
        config,
        ids,
        dtype,
        CHOICE_ROWS if options.quick else ROWS,
        rounds=3 if options.quick else 9,
        typical=statistics.median,
    )
    return {
        "model": options.model_name,
        "dtype": figures.formats[0].format,
        "machine": machine.describe(),
        "tokens": len(ids),
        "fp32_loss": figures.fp32_loss,
        "formats": format_rows(figures),
        "rows": time_rows(figures),
    }


def format_rows(figures: WeightFigures) -> list[Row]:
    """One row for each format; `mib` of projections and head."""
    best = figures.best()
    return [
        {
            "format": one.format,
            "loss_rise": round(figures.rise(one), 5),
            "agreement": round(one.agreement, 4),
            "mib": round(one.num_bytes / (1 << 20), 1),
            "verdict": "taken" if one == best else figures.why_not(one) or "slower",
        }
        for one in figures.formats
    ]


def time_rows(figures: WeightFigures) -> list[Row]:
    """One row for each format and number of rows of a step."""
    plain = figures.formats[0]
    return [
        {
            "rows": count,
            "format": one.format,
            "ms": round(one.step_s[i] * 1e3, 2),
            "ratio": round(plain.step_s[i] / one.step_s[i], 2),
        }
        for i, count in enumerate(figures.rows)
        for one in figures.formats
    ]


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return run("weights", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

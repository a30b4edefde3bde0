"""What every benchmark shares: options, refusal, a table for people, JSON as the last line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError
from engine.model.source import EMBEDDED, resolve_model

DATA_DIR = Path(__file__).parent.parent / "data"
MIN_FLOOR_SHARE = 0.5  # of its floor that a side must reach before a ratio counts

Row = dict[str, Any]


class Refused(Exception):
    """The sides' results differ, or a side did not do what it is timed for: nothing is reported."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line said."""

    quick: bool
    json: bool
    model_dir: Path
    dtype: Literal["auto", "fp32", "bf16"]
    extra: argparse.Namespace  # options of one benchmark alone

    @property
    def model_name(self) -> str:
        return self.model_dir.name


def progress(text: str) -> None:
    """Tell a person what is going on; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


def parse(
    doc: str | None,
    argv: Sequence[str] | None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:
    """Parse the command line. Raises ModelError when there is no such model."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions: 50 s")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    parser.add_argument("--model", default=EMBEDDED, help="'embedded', a directory or a hub id")
    parser.add_argument("--dtype", choices=["auto", "fp32", "bf16"], default="auto")
    if add_options is not None:
        add_options(parser)
    arguments = parser.parse_args(argv)
    return Options(
        quick=arguments.quick,
        json=arguments.json,
        model_dir=resolve_model(arguments.model, DATA_DIR, progress),
        dtype=arguments.dtype,
        extra=arguments,
    )


def run(
    name: str,
    doc: str | None,
    measure: Callable[[Options], Row],
    argv: Sequence[str] | None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Run one benchmark and print its result; the exit status is 1 when it refuses."""
    began = time.perf_counter()
    try:
        options = parse(doc, argv, add_options)
        result = measure(options)
    except (Refused, ModelError) as error:
        progress(f"benchmarks.{name} refuses to report: {error}")
        return 1
    result = {"benchmark": name, "quick": options.quick, **result}
    result["wall_s"] = round(time.perf_counter() - began, 1)
    for key, value in result.items():
        if isinstance(value, list):
            print(f"\n{key}\n{table(value)}")
        elif isinstance(value, Mapping):
            print(f"{key}: " + ", ".join(f"{k} {_text(v)}" for k, v in value.items()))
        else:
            print(f"{key}: {_text(value)}")
    if options.extra.out is not None:
        options.extra.out.parent.mkdir(parents=True, exist_ok=True)
        options.extra.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    return 0


def table(rows: Sequence[Row]) -> str:
    """Rows of equal keys as aligned columns."""
    if not rows:
        return "(no rows)"
    lines = [list(rows[0])] + [[_text(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def floor_shares(ours: float, theirs: float) -> Row:
    """Both sides' share of their floor, and whether a ratio between them counts."""
    return {
        "ours_floor_share": round(ours, 3),
        "theirs_floor_share": round(theirs, 3),
        "counts": min(ours, theirs) >= MIN_FLOOR_SHARE,
    }

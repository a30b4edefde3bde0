"""Plots of results that `--out` wrote, an SVG beside each: `python -m benchmarks.plot FILE...`.

decode: tokens per second over the prefix's length, and over the batch, shared and unshared.
resume: time to the first token over the history's length, by method, a panel for each disk speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import Row, progress

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "rejoinder"  # the same data give the same file
SIDES = {"ours_tok_s": ("shared", "-", "o"), "theirs_tok_s": ("unshared", "--", "x")}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")


def plot_decode(result: Row) -> Figure:
    """Two panels a model."""
    rows: list[Row] = result["shared_vs_unshared"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(12, 5 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for model, (over_prefix, over_batch) in zip(models, panels, strict=True):
        own = [row for row in rows if row["model"] == model]
        _curves(over_prefix, own, "prefix", "batch", "shared prefix (tokens)")
        _curves(over_batch, own, "batch", "prefix", "chats that decode together")
        over_prefix.set_title(f"{model}, {result['dtype']}")
    return figure


def _curves(axes: Axes, rows: Sequence[Row], x: str, group: str, label: str) -> None:
    groups = sorted({row[group] for row in rows})
    for value, colour in zip(groups, COLOURS, strict=False):
        members = sorted((row for row in rows if row[group] == value), key=lambda row: int(row[x]))
        for key, (side, line, marker) in SIDES.items():
            axes.plot(
                [row[x] for row in members],
                [row[key] for row in members],
                line,
                marker=marker,
                color=colour,
                label=f"{group} {value}, {side}",
            )
    axes.set_xscale("symlog", base=2, linthresh=32 if x == "prefix" else 1)
    ticks = sorted({row[x] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("tokens per second")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def plot_resume(result: Row) -> Figure:
    """A panel for each model and disk speed."""
    rows: list[Row] = result["rows"]
    panels = list(dict.fromkeys(map(_disk, rows)))
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        own = [row for row in rows if _disk(row) == panel]
        for method, colour in zip(
            dict.fromkeys(row["method"] for row in own), COLOURS, strict=False
        ):
            members = sorted(
                (row for row in own if row["method"] == method), key=lambda row: int(row["tokens"])
            )
            axes.plot(
                [row["tokens"] for row in members],
                [row["ttft_ms"] for row in members],
                marker="o",
                color=colour,
                label=method,
            )
        axes.set_title(", ".join(panel), fontsize="small")
        axes.set_xlabel("history (tokens)")
        axes.set_ylabel("time to first token (ms)")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def _disk(row: Row) -> tuple[str, str]:
    """Model and disk of a row; the disk's own speed is measured anew for each of them."""
    speed = f"{row['disk_mbps']:.0f} MB/s" if row["throttled"] else "the disk's own speed"
    return row["model"], speed


PLOTS: dict[str, Callable[[Row], Figure]] = {"decode": plot_decode, "resume": plot_resume}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when a file is no result that can be plotted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    for path in parser.parse_args(argv).results:
        result = json.loads(path.read_text())
        plot = PLOTS.get(result.get("benchmark", ""))
        if plot is None:
            progress(f"{path} is no result of: {', '.join(PLOTS)}")
            return 1
        plot(result).savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks and times everything that needs a CUDA device, in one run of at most eight minutes.

Needs Python 3.11 or newer with torch, triton, numpy and pytest, and nothing else. In this order:
versions and card, the tests marked `gpu`, the attention kernels against their floor, decoding by
models of Llama 2 7B's and CodeLlama 13B's shape with random weights, by three sides in turn (see
`gpu_decode`), whose logits are compared first. A short table comes last. What no time is left for
says so. The exit status is 1 when something failed or disagrees.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_host import ROOT, run_tests, versions

if TYPE_CHECKING:
    from benchmarks.gpu_lab import Lab
    from engine.model.geometry import ModelConfig

RESULTS = ROOT / "benchmarks" / "results"
BUDGET_S = 450.0
TESTS_SHARE = 0.45  # of the budget, by when the tests are to be done
ATTENTION_SHARE = 0.6  # and the attention kernels

Row = dict[str, Any]


class Check:
    """Owns the result of a run and its clock."""

    def __init__(self, budget_s: float, interpret: bool) -> None:
        self.interpret = interpret
        self.failed: list[str] = []
        self.result: Row = {"benchmark": "gpu_check", "interpreted": interpret, "notes": []}
        self._began = time.perf_counter()
        self._budget_s = budget_s

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def deadline(self, share: float) -> float:
        """The clock's reading when that share of the budget is spent."""
        return self._began + share * self._budget_s

    def say(self, text: object) -> None:
        print(f"[{self.elapsed():5.0f} s] {text}", flush=True)

    def note(self, text: str) -> None:
        """Say something that belongs to the result."""
        self.result["notes"].append(text)
        self.say(text)

    def section(self, name: str, run: Callable[[], None]) -> None:
        """Run a part; one that fails does not cost the others their device time."""
        if time.perf_counter() >= self.deadline(1.0):
            self.note(f"{name}: skipped, no time is left")
            return
        self.say(name)
        try:
            run()
        except Exception as error:  # a section's boundary: what fails is shown and counted
            traceback.print_exc()
            self.failed.append(f"{name}: {type(error).__name__}: {error}")

    # -- the sections --------------------------------------------------------------------------

    def tests(self) -> None:
        """Run the `gpu` tests; in the interpreter only collect them."""
        limit_s = self.deadline(TESTS_SHARE) - time.perf_counter()
        self.result["tests"] = run_tests(limit_s, collect_only=self.interpret)
        self.note(f"tests: {self.result['tests']}")

    def attention(self, lab: Lab) -> None:
        """Time the attention kernels."""
        from benchmarks.gpu_attention import attention_rows, sharing_rows

        self.result["sharing"] = sharing_rows(lab)
        for row in attention_rows(lab):
            self.result["attention"].append(row)
            self.say(row)
            if time.perf_counter() > self.deadline(ATTENTION_SHARE):
                self.note("attention: the other sizes were skipped, no time is left")
                return

    def model(self, lab: Lab, name: str, config: ModelConfig, until: float) -> None:
        """Time decoding with a model; no size is begun after `until`."""
        from benchmarks.gpu_cells import FULL, SMALL, model_rows

        for item in model_rows(lab, name, config, SMALL if self.interpret else FULL, until):
            if isinstance(item, str):
                self.note(item)
            else:
                self.result["decode"].append(item)
                self.say(item)

    def run(self) -> None:
        """Everything, in order."""
        import torch

        from benchmarks.gpu_cells import FULL, SMALL, losses
        from benchmarks.gpu_lab import Lab, interpreted, measure_roofs

        self.result |= versions() | {"sharing": [], "attention": [], "decode": []}
        self.say(self.result)
        self.section("tests", self.tests)
        place = (torch.device("cpu"), torch.float32)
        with interpreted() if self.interpret else nullcontext():
            if not self.interpret:
                place = (torch.device("cuda"), torch.bfloat16)
            lab = measure_roofs(Lab(*place))
            self.result["bytes_per_s"], self.result["flops_per_s"] = (
                lab.bytes_per_s,
                lab.flops_per_s,
            )
            self.note(
                f"roofs: copies {lab.bytes_per_s / 1e9:.0f} GB/s, "
                f"matrix products {lab.flops_per_s / 1e12:.1f} TFLOP/s"
            )
            self.section("attention", partial(self.attention, lab))
            models = (SMALL if self.interpret else FULL).models
            for number, (name, config) in enumerate(models):
                now, end = time.perf_counter(), self.deadline(1.0)
                until = now + (end - now) / (len(models) - number)
                self.section(name, partial(self.model, lab, name, config, until))
        self.result["losses"] = losses(self.result["decode"])
        self.result["failed"] = self.failed
        self.result["wall_s"] = round(self.elapsed(), 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="tiny sizes on the CPU in Triton's interpreter: shows that everything runs",
    )
    parser.add_argument(
        "--out",
        nargs="?",
        type=Path,
        const=RESULTS,
        help="write the result as JSON to this file or directory; without one: benchmarks/results",
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds after which nothing new is begun"
    )
    arguments = parser.parse_args(argv)
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not arguments.interpret and not torch.cuda.is_available():
        print("no CUDA device: --interpret runs tiny sizes on the CPU instead", file=sys.stderr)
        return 2
    check = Check(arguments.budget, arguments.interpret)
    check.run()
    show(check.result)
    if arguments.out is not None:
        print(f"written to {write(check.result, arguments.out)}")
    return 1 if check.failed else 0


def show(result: Row) -> None:
    """Print the tables, what they were measured with, and what failed."""
    for title in ("sharing", "attention", "decode", "losses"):
        print(f"\n{title}\n{table(result[title])}")
    heading = ("date", "card", "driver", "torch", "triton", "commit", "tests", "wall_s")
    print("\n" + ", ".join(f"{key} {result[key]}" for key in heading if key in result))
    for text in result["failed"]:
        print(f"FAILED {text}")


def write(result: Row, out: Path) -> Path:
    """Write the result to a file, or to one named by card and date in a directory."""
    if out.suffix != ".json":
        card = str(result.get("card", "interpreted")).lower().replace(" ", "-")
        out = out / f"gpu-{card}-{result['date'][:10]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    return out


def table(rows: Sequence[Row]) -> str:
    """Rows of equal keys as aligned columns."""
    if not rows:
        return "(no rows)"
    lines = [list(rows[0])] + [["" if v is None else str(v) for v in r.values()] for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())

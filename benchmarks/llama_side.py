"""Decode steps and prompts of the same shape by llama.cpp, timed by its `llama-batched-bench`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Refused, Row

CELLS = 256  # llama.cpp rounds the context of a sequence up to this many tokens
TIMEOUT_S = 900
# How it keeps the K/V of several sequences: one buffer for all, where a shared prompt is stored
# once, or what it does by default (older versions know no choice).
CACHES: dict[str, list[str]] = {"unified": ["--kv-unified"], "default": []}


class _Measured(NamedTuple):
    """Seconds of the prompt, and the mean of a step behind it."""

    prefill_s: float
    step_s: float


class LlamaSide:
    """Runs the binary once a measurement; for each batch with the kind of cache that is faster."""

    key, name = "vs_llamacpp", "llama.cpp"
    kv_bytes = 2.0  # fp16

    def __init__(self, binary: Path, gguf: Path, threads: int) -> None:
        """Ask the binary for its version. Raises Refused when it cannot be run."""
        self._binary, self._gguf, self._threads = binary.expanduser().absolute(), gguf, threads
        about = self._run(["--version"])
        found = re.search(r"version: *(.+)", about.stdout + about.stderr)
        self.version = found.group(1).strip() if found else "unknown"
        self._prompt = self._suffix = 0
        self._caches: dict[tuple[int, int], str] = {}  # (prompt, batch) -> the faster one

    def begin(
        self, prefix_ids: list[int], suffixes: list[list[int]], first_tokens: list[int]
    ) -> None:
        """Take over the lengths; it makes its own random tokens, and at least one of a prompt."""
        self._prompt, self._suffix = max(1, len(prefix_ids)), len(suffixes[0])

    def warm_up(self, batch: int, steps: int) -> None:
        """Nothing: each run is a process of its own that warms itself up."""

    def step_seconds(self, batch: int, steps: int) -> list[float]:
        """The mean step while each row grows from nothing to what ours end at.

        So its rows hold fewer keys than ours, to its advantage. The first measurement of a shape
        runs with both kinds of cache, and gives the faster one's.
        """
        tokens = self._suffix + steps + 1
        cache = self._caches.get((self._prompt, batch))
        if cache is not None:
            return [self._measure(self._prompt, tokens, batch, cache).step_s]
        seconds: dict[str, float] = {}
        refusals = []
        for name in CACHES if batch > 1 else ("default",):  # of one sequence both are the same
            try:
                seconds[name] = self._measure(self._prompt, tokens, batch, name).step_s
            except Refused as refusal:
                refusals.append(refusal)
        if not seconds:
            raise refusals[-1]
        cache = min(seconds, key=seconds.__getitem__)
        self._caches[self._prompt, batch] = cache
        return [seconds[cache]]

    def prefill_seconds(self, ids: list[int]) -> tuple[float, int | None]:
        """Seconds of a prompt as long as this one; which token follows it does not say."""
        return self._measure(len(ids), 1, 1, "default").prefill_s, None

    def notes(self, batch: int) -> Row:
        return {"kv_cache": self._caches[self._prompt, batch]}

    def _measure(self, prompt: int, tokens: int, batch: int, cache: str) -> _Measured:
        cells = batch * -(-(prompt + tokens) // CELLS) * CELLS
        options: dict[str, object] = {
            "-m": self._gguf,
            "-npp": prompt,
            "-ntg": tokens,
            "-npl": batch,
            "-c": cells,
            "-t": self._threads,
            "-tb": self._threads,
            "--output-format": "jsonl",
        }
        arguments = [str(part) for option in options.items() for part in option]
        done = self._run([*arguments, "-pps", *CACHES[cache]])
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise Refused(f"{self._binary.name} failed ({done.returncode}): {' '.join(last)}")
        expected = {
            "pp": prompt,
            "tg": tokens,
            "pl": batch,
            "is_pp_shared": 1,
            "n_threads": self._threads,
        }
        return self._read(done.stdout, expected)

    def _read(self, output: str, expected: dict[str, int]) -> _Measured:
        lines = [line for line in output.splitlines() if line.lstrip().startswith("{")]
        if len(lines) != 1:
            raise Refused(f"{self._binary.name} printed {len(lines)} results, not one")
        try:
            row: dict[str, Any] = json.loads(lines[0])
            said = {name: int(row[name]) for name in expected}
            times = [
                (expected["pp"], float(row["t_pp"]), float(row["speed_pp"])),
                (expected["pl"] * expected["tg"], float(row["t_tg"]), float(row["speed_tg"])),
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"{self._binary.name} printed {lines[0]!r}: {error!r}") from error
        if said != expected:
            raise Refused(f"{self._binary.name} measured {said}, not {expected}")
        for tokens, seconds, speed in times:
            if not (seconds > 0 and 0.95 < speed * seconds / tokens < 1.05):
                raise Refused(
                    f"{self._binary.name}: {speed} tokens/s are not {tokens} in {seconds} s"
                )
        return _Measured(times[0][1], times[1][1] / expected["tg"])

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [str(self._binary), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except OSError as error:
            raise Refused(f"--llama-bench: {self._binary} cannot be run: {error}") from error
        except subprocess.TimeoutExpired:
            raise Refused(f"{self._binary.name} took longer than {TIMEOUT_S} s") from None

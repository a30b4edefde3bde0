"""The same decode steps and prompts by OpenVINO GenAI's continuous batching, in a child process."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from benchmarks.agreement import same_choices
from benchmarks.report import Refused, Row

PACKAGE = "openvino_genai"
WORKER = "benchmarks.openvino_worker"
ROOT = Path(__file__).parent.parent


class OpenVinoSide:
    """Owns the child process, its pipeline and its prefix cache. One thread."""

    key, name = "vs_openvino", "openvino-genai"
    kv_bytes = 1.0  # its CPU plugin keeps K/V in 8 bits

    def __init__(self, gguf: Path, threads: int, cache_bytes: int) -> None:
        """Load the file, with a cache of at least this many bytes. Raises Refused."""
        if find_spec(PACKAGE) is None:
            raise Refused(
                "--openvino needs the package openvino-genai, which is not installed and which "
                "this project does not depend on: pip install openvino-genai"
            )
        cache_gb = max(1, math.ceil(cache_bytes / 1e9))
        self._process = Popen(
            [sys.executable, "-m", WORKER, str(gguf), str(threads), str(cache_gb)],
            stdin=PIPE,
            stdout=PIPE,
            text=True,
            cwd=ROOT,
        )
        self._agreement = 0.0
        self._prompts: list[list[int]] = []
        try:
            self.version = str(self._reply()["version"])
        except Refused:
            self.close()
            raise

    def begin(
        self, prefix_ids: list[int], suffixes: list[list[int]], first_tokens: list[int]
    ) -> None:
        """Cache the prefix and all suffixes, and compare the first greedy tokens."""
        self._prompts = [prefix_ids + suffix for suffix in suffixes]
        self._generate(self._prompts[:1], 1)  # the others find the prefix that this one leaves
        firsts = [row[0] for row in self._generate(self._prompts, 1)["tokens"]]
        what = f"prefix {len(prefix_ids)}, OpenVINO"
        self._agreement = same_choices(what, first_tokens, firsts)

    def warm_up(self, batch: int, steps: int) -> None:
        """Decode once untimed."""
        self.step_seconds(batch, steps)

    def step_seconds(self, batch: int, steps: int) -> list[float]:
        """Seconds of `steps` steps, some fewer when rows began one after the other."""
        seconds: list[float] = self._generate(self._prompts[:batch], steps + 1)["steps_s"]
        if len(seconds) < max(1, steps // 2):
            raise Refused(
                f"OpenVINO decoded all {batch} rows together in {len(seconds)} of {steps} steps"
            )
        return seconds

    def notes(self, batch: int) -> Row:
        return {"agreement": round(self._agreement, 3)}

    def prefill_seconds(self, ids: list[int]) -> tuple[float, int | None]:
        """Seconds from the request to the first greedy token, and that."""
        reply = self._generate([ids], 1)
        return reply["took_s"], reply["tokens"][0][0]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        request = {"prompts": prompts, "new_tokens": new_tokens}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Refused("OpenVINO's process has ended") from None
        reply = self._reply()
        if [len(row) for row in reply["tokens"]] != [new_tokens] * len(prompts):
            raise Refused(
                f"OpenVINO did not give {new_tokens} tokens to each of {len(prompts)} rows"
            )
        return reply

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Refused("OpenVINO's process ended without an answer")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise Refused(f"OpenVINO: {reply['error']}")
        return reply

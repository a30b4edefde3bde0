"""OpenVINO GenAI in a process of its own, so that its threads and ours never meet.

`python -m benchmarks.openvino_worker GGUF THREADS CACHE_GB` answers each line of standard input,
a JSON object `{prompts: list of token ids, new_tokens}`, with one JSON line: first
`{version}`, then `{tokens, steps_s, took_s}` for each, or `{error}`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np


class Worker:
    """Owns the pipeline: paged attention, prefix caching on, everything else as it comes."""

    def __init__(self, gguf: str, threads: int, cache_gb: int) -> None:
        """Load the model. Raises ImportError, RuntimeError."""
        self._genai: Any = importlib.import_module("openvino_genai")
        self._tensor: Any = importlib.import_module("openvino").Tensor
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = cache_gb
        self._pipeline: Any = self._genai.ContinuousBatchingPipeline(
            gguf, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._requests = 0
        self.version = str(getattr(self._genai, "__version__", "unknown"))

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[list[list[int]], list[float]]:
        """Greedy ids of each row, `new_tokens` of them; seconds of the steps that decoded all rows.

        A step that gave a row its first token, or not every row one token, is not timed. Raises
        RuntimeError.
        """
        config = self._genai.GenerationConfig(
            max_new_tokens=new_tokens, ignore_eos=True, do_sample=False
        )
        handles = []
        for prompt in prompts:
            ids = self._tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, config))
            self._requests += 1
        tokens: list[list[int]] = [[] for _ in prompts]
        steps_s = []
        while self._pipeline.has_non_finished_requests():
            before = [len(row) for row in tokens]
            began = time.perf_counter()
            self._pipeline.step()
            elapsed = time.perf_counter() - began
            for row, handle in zip(tokens, handles, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        row.extend(output.generated_ids)
            gained = [len(row) - count for row, count in zip(tokens, before, strict=True)]
            if all(before) and set(gained) == {1}:
                steps_s.append(elapsed)
        return tokens, steps_s

    def answer(self, line: str) -> dict[str, object]:
        """The reply to one request. Raises RuntimeError."""
        request = json.loads(line)
        began = time.perf_counter()
        tokens, steps_s = self.generate(request["prompts"], request["new_tokens"])
        took_s = time.perf_counter() - began
        return {"tokens": tokens, "steps_s": steps_s, "took_s": took_s}


def main() -> None:
    """Answer until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no reply

    def reply(values: dict[str, object]) -> None:
        print(json.dumps(values), file=replies, flush=True)

    gguf, threads, cache_gb = sys.argv[1:]
    try:
        worker = Worker(gguf, int(threads), int(cache_gb))
        reply({"version": worker.version})
        for line in sys.stdin:
            reply(worker.answer(line))
    except (ImportError, RuntimeError) as error:
        reply({"error": str(error)})


if __name__ == "__main__":
    main()

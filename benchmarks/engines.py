"""Other engines beside ours, each in a process of its own and reading one GGUF file."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from gguf import GGUFReader

from benchmarks.comparison import Comparison
from benchmarks.decoding import Decoding
from benchmarks.floors import kv_bytes_per_token, layer_params
from benchmarks.llama_side import LlamaSide
from benchmarks.openvino_side import OpenVinoSide
from benchmarks.report import Options, Refused, Row, progress
from engine.model.model_config import ModelConfig


class Engine(Protocol):
    """Another engine. One thread; does nothing between calls."""

    key: str  # of its rows in the result
    name: str
    kv_bytes: float  # of one number of its K/V
    version: str

    def begin(
        self, prefix_ids: list[int], suffixes: list[list[int]], first_tokens: list[int]
    ) -> None:
        """Take over a prefix and the rows' suffixes; `first_tokens` are our greedy choices.

        Raises Refused when its own choices show another model.
        """

    def warm_up(self, batch: int, steps: int) -> None:
        """Meet the shapes of `step_seconds`, if it has not seen them yet. Raises Refused."""

    def step_seconds(self, batch: int, steps: int) -> list[float]:
        """Decode the first `batch` rows; seconds of one step each, or of their mean.

        Raises Refused when it did not do that.
        """

    def notes(self, batch: int) -> Row:
        """What else its rows tell."""

    def prefill_seconds(self, ids: list[int]) -> tuple[float, int | None]:
        """Read a prompt; seconds until its first greedy token, and that if it tells.

        Raises Refused when it did not do that.
        """


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `open_engines`."""
    parser.add_argument("--gguf", type=Path, help="the model as a GGUF file, for other engines")
    parser.add_argument(
        "--openvino",
        action="store_true",
        help="compare with OpenVINO GenAI (pip install openvino-genai); needs --gguf; "
        "adds half a minute or more to --quick",
    )
    parser.add_argument(
        "--llama-bench",
        type=Path,
        metavar="PATH",
        help="compare with llama.cpp by this llama-batched-bench binary; needs --gguf; "
        "adds two minutes or more to --quick",
    )


@contextmanager
def open_engines(
    options: Options, config: ModelConfig, threads: int, most_rows: int, most_tokens: int
) -> Iterator[tuple[list[Engine], float]]:
    """The engines that were asked for, and bytes of a weight in the GGUF file (0 without one).

    `most_tokens`: of a row, prefix included. Raises Refused when one cannot run.
    """
    extra = options.extra
    if not (extra.openvino or extra.llama_bench):
        yield [], 0.0
        return
    if extra.gguf is None:
        raise Refused("--openvino and --llama-bench need the model as a GGUF file: --gguf PATH")
    weight_bytes = gguf_weight_bytes(extra.gguf, config)
    with ExitStack() as stack:
        engines: list[Engine] = []
        if extra.openvino:
            progress("loading OpenVINO GenAI")
            cache_bytes = most_rows * most_tokens * kv_bytes_per_token(config, 2)
            openvino = OpenVinoSide(extra.gguf, threads, cache_bytes)
            stack.callback(openvino.close)
            engines.append(openvino)
        if extra.llama_bench:
            engines.append(LlamaSide(extra.llama_bench, extra.gguf, threads))
        yield engines, weight_bytes


def compare(
    engine: Engine, decoding: Decoding, batch: int, suffix: int, steps: int, rounds: int
) -> Comparison:
    """Medians of both sides' steps, the sides alternating by rounds. Raises Refused.

    Each round decodes the first `batch` rows from their suffixes of `suffix` tokens on.
    """
    engine.warm_up(batch, steps)
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        if number % 2:
            theirs += engine.step_seconds(batch, steps)
        ours += _our_step_seconds(decoding, batch, suffix, steps)
        if not number % 2:
            theirs += engine.step_seconds(batch, steps)
    return Comparison(
        batch,
        decoding.prefix,
        suffix + 1 + (steps - 1) / 2,
        statistics.median(ours),
        statistics.median(theirs),
        engine.notes(batch),
    )


def _our_step_seconds(decoding: Decoding, batch: int, suffix: int, steps: int) -> list[float]:
    decoding.rewind(suffix + 1)
    decoding.step("shared", batch)  # untimed: the other side has had the caches
    seconds = []
    for _ in range(steps):
        elapsed, _, tokens = decoding.step("shared", batch)
        seconds.append(elapsed)
        decoding.advance(tokens)
    return seconds


def gguf_weight_bytes(path: Path, config: ModelConfig) -> float:
    """Mean bytes of a weight in the file. Raises Refused unless it holds this model's geometry."""
    expected: dict[str, object] = {
        "block_count": config.num_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
    }
    try:
        reader = GGUFReader(path)
        architecture = reader.get_field("general.architecture")
        for key, value in expected.items():
            entry = architecture and reader.get_field(f"{architecture.contents()}.{key}")
            found = None if entry is None else entry.contents()
            if found != value:
                raise Refused(f"{path} is another model: its {key} is {found}, ours {value}")
    except (OSError, ValueError, IndexError) as error:
        raise Refused(f"{path} is not a usable GGUF file: {error}") from error
    weights = config.num_layers * layer_params(config) + config.vocab_size * config.hidden_size
    return sum(int(tensor.n_bytes) for tensor in reader.tensors) / weights

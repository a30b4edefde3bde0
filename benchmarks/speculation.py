"""What drafts by prompt lookup bring: how long answers take with them and without.

One engine answers the same questions in turns with drafts (`auto`: where the engine measures that
they pay) and without. `quoting`: chats that are asked to give a text back, word for word; `prose`:
chats that are asked about it. `ratio`: seconds a token of an answer from its first to its end, mean
of the chats, without drafts over with them, median of the pairs of neighbouring rounds; `slowest`
the same of the chat that gains least. `right`: share of drafted tokens that the model chose.
`same`: share of chats whose ids are the same with and without drafts; in fp32 all must be, in other
formats rows of a step that differ in number round differently. `least_ratio` is the least of all.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import machine
from benchmarks.floors import kv_bytes_per_token
from benchmarks.report import Options, Refused, Row, progress, run
from benchmarks.texts import text_ids
from engine.config import EngineConfig
from engine.devices import resolve_dtype
from engine.engine import Engine
from engine.memory.page_pool import pages_for
from engine.messages import Delta, Done, Failed, FromEngine, SamplingParams, Submit
from engine.model.model_config import read_model_config
from engine.request import State
from engine.speculation import Speculation
from kernels.threading import configure_environment, configure_torch

QUESTIONS = {
    "quoting": ("Repeat the following text word for word:\n\n", ""),
    "prose": ("", "\n\nWhat is this about? Explain it to a beginner in your own words."),
}
TEXT = 160  # tokens of the text that a question is about
SKIP = 211  # between the texts of two chats


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    batches: tuple[int, ...]
    answer: int  # tokens, at most
    rounds: int  # of each side


QUICK = Sizes(batches=(1, 4), answer=64, rounds=3)
FULL = Sizes(batches=(1, 2, 4, 8, 16, 32), answer=128, rounds=5)


class Chats:
    """Owns an engine, and asks it. One thread."""

    def __init__(self, options: Options, sizes: Sizes) -> None:
        """Load the model. Raises ModelError."""
        config = read_model_config(options.model_dir)
        most = max(sizes.batches)
        page_bytes = 64 * kv_bytes_per_token(config, resolve_dtype(options.dtype).itemsize)
        pages = most * pages_for(2 * TEXT + sizes.answer + 64) + 8
        self._events: list[FromEngine] = []
        self._serials = itertools.count()
        self._answer = sizes.answer
        self._engine = Engine(
            EngineConfig(
                model_dir=str(options.model_dir),
                model_name=options.model_name,
                dtype=options.dtype,
                weights=options.extra.weights,
                kv_memory_bytes=pages * page_bytes,
                max_batch=most,
                max_queue=most,
            ),
            None,
            self._events.append,
        )
        self._sides = {
            choice: Speculation(choice, self._engine.context_length) for choice in ("auto", "never")
        }

    def ask(self, kind: str, batch: int, choice: str) -> tuple[list[float], list[list[int]]]:
        """Each chat's seconds a token once all decode, and its answer's ids. Raises Refused."""
        engine, tokenizer = self._engine, self._engine.tokenizer
        engine.scheduler.speculation = self._sides[choice]
        while engine.scheduler.resident.evict_one():
            pass
        self._events.clear()
        before, behind = QUESTIONS[kind]
        requests: list[str] = []
        for chat in range(batch):
            text = tokenizer.decode(text_ids(tokenizer, TEXT, skip=chat * SKIP))
            requests.append(f"r{next(self._serials)}")
            engine.handle(
                Submit(
                    request_id=requests[-1],
                    chat_id=f"chat{chat}",
                    prefix_ids=[],
                    history_ids=[],
                    history_computed=0,
                    new_ids=tokenizer.user_ids(before + text + behind, first=True),
                    sampling=SamplingParams(temperature=0.0, max_tokens=self._answer),
                )
            )
        scheduler = engine.scheduler
        while any(r.state is not State.DECODE for r in (*scheduler.waiting, *scheduler.running)):
            engine.step()
        said = [len(ids) for ids in map(self._ids, requests)]
        began, ended = time.perf_counter(), dict[str, float]()
        while engine.has_work():
            seen = len(self._events)
            engine.step()
            for event in self._events[seen:]:
                if isinstance(event, Failed):
                    raise Refused(f"a chat failed: {event.reason}")
                if isinstance(event, Done):
                    ended[event.request_id] = time.perf_counter() - began
        answers = [self._ids(request) for request in requests]
        return [
            ended.get(request, 0.0) / max(1, len(ids) - before)
            for request, ids, before in zip(requests, answers, said, strict=True)
        ], answers

    def _ids(self, request: str) -> list[int]:
        said = [e for e in self._events if isinstance(e, Delta) and e.request_id == request]
        return [token for delta in said for token in delta.token_ids]

    def drafted(self) -> tuple[int, int]:
        """Tokens drafted so far, and those of them that were right."""
        side = self._sides["auto"]
        return side.drafted, side.accepted


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    configure_environment()
    configure_torch()
    sizes = sizes or (QUICK if options.quick else FULL)
    about = machine.describe()
    progress(f"loading {options.model_name}")
    chats = Chats(options, sizes)
    rows = [
        _row(chats, kind, batch, sizes.rounds, fp32=options.dtype == "fp32")
        for kind in QUESTIONS
        for batch in sizes.batches
    ]
    return {
        "model": options.model_name,
        "dtype": options.dtype,
        "weights": options.extra.weights,
        "machine": about,
        "rows": rows,
        "least_ratio": min(row["ratio"] for row in rows),
    }


def _row(chats: Chats, kind: str, batch: int, rounds: int, *, fp32: bool) -> Row:
    progress(f"{kind}, {batch} chats")
    seconds: dict[str, list[list[float]]] = {"auto": [], "never": []}  # by round, of each chat
    answers: dict[str, list[list[int]]] = {}
    before = chats.drafted()
    for number in range(-1, rounds):  # the first meets shapes and measures what rows cost
        for choice in ("auto", "never") if number % 2 else ("never", "auto"):
            took, answers[choice] = chats.ask(kind, batch, choice)
            if number >= 0:
                seconds[choice].append(took)
    after = chats.drafted()
    drafted, right = (b - a for a, b in zip(before, after, strict=True))
    same = sum(a == b for a, b in zip(answers["auto"], answers["never"], strict=True)) / batch
    if fp32 and same < 1:
        raise Refused(f"{kind}, {batch} chats: drafts changed an answer in fp32")
    means = {choice: [statistics.mean(one) for one in seconds[choice]] for choice in seconds}
    ratios = [n / a for n, a in zip(means["never"], means["auto"], strict=True)]
    each = [
        statistics.median(
            n[i] / a[i] for n, a in zip(seconds["never"], seconds["auto"], strict=True) if a[i]
        )
        for i in range(batch)
        if any(a[i] for a in seconds["auto"])
    ]
    return {
        "kind": kind,
        "chats": batch,
        "ratio": round(statistics.median(ratios), 3),
        "slowest": round(min(each), 3),
        "auto_ms": round(statistics.median(means["auto"]) * 1e3, 2),
        "never_ms": round(statistics.median(means["never"]) * 1e3, 2),
        "drafted": drafted,
        "right": round(right / drafted, 3) if drafted else 0.0,
        "same": round(same, 3),
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=["bf16", "fp32", "int8", "int4"],
        default="auto",
        help="their format, the dtype unless given",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("speculation", __doc__, measure, argv, _add_options)


if __name__ == "__main__":
    sys.exit(main())

"""Chats over real HTTP: several turns with idle gaps, lengths as in public chat logs, seeded.

Every side is a server process of its own and gets the same questions at the same times of a chat's
life, greedy, and exactly as many tokens of an answer as the load says. A turn after a gap is a
returning one: the chat has left memory meanwhile. `ttft` is from sending to the first piece of
text (restoring included), `itl` the gaps between pieces, `tok_s` all output tokens over the time
of the whole load, idle gaps included.

With `--llama-server FILE --gguf FILE` llama.cpp's server gets the same load; its slots are saved
and restored by hand, as its users do. Ratios are ours over theirs for `tok_s`, theirs over ours
for times: above 1 is better for us.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from app.assistants.loader import builtin_assistants
from benchmarks import machine
from benchmarks.load import Exchange, Shape, draw
from benchmarks.report import Options, Refused, Row, progress, run
from benchmarks.serve_sides import Answer, LlamaServer, Ours, Side
from engine.model.tokenizer import ChatTokenizer
from engine.request import percentile

SEED = 20261130
QUICK = Shape(chats=4, turns=2, answer_tokens=48.0, max_answer=128, gap_s=3.0)
FULL = Shape(chats=8, turns=3)
ROUNDS = {True: 1, False: 2}
MARGIN = 256  # tokens of a chat's context beyond its questions and answers


@dataclass(frozen=True)
class Turn:
    """One turn of one chat as its client saw it."""

    returning: bool
    answer: Answer

    @property
    def ttft_s(self) -> float:
        return self.answer.arrivals[0] - self.answer.asked

    @property
    def gaps_s(self) -> list[float]:
        arrivals = self.answer.arrivals
        return [after - before for before, after in itertools.pairwise(arrivals)]


async def _chat(
    side: Side, http: httpx.AsyncClient, number: int, exchanges: Sequence[Exchange]
) -> list[Turn]:
    conversation = side.conversation(http, number)
    turns: list[Turn] = []
    for exchange in exchanges:
        await asyncio.sleep(exchange.gap_s)
        answer = await conversation.ask(exchange)
        if answer.tokens != exchange.tokens or not answer.arrivals:
            raise Refused(f"{side.name} made {answer.tokens} tokens, not {exchange.tokens}")
        if turns and not answer.cached:
            raise Refused(f"{side.name} computed a returning chat from its beginning")
        turns.append(Turn(returning=bool(turns), answer=answer))
    return turns


async def _put_on(side: Side, load: Sequence[Sequence[Exchange]]) -> tuple[list[Turn], float]:
    # llama.cpp's server closes a connection after 5 idle seconds, also when a question is on its
    # way.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as http:
        began = time.perf_counter()
        chats = await asyncio.gather(
            *(_chat(side, http, number, exchanges) for number, exchanges in enumerate(load))
        )
        return [turn for chat in chats for turn in chat], time.perf_counter() - began


def one_round(side: Side, load: Sequence[Sequence[Exchange]]) -> Row:
    """Start the server, put the load on it, stop it; returns the figures. Raises Refused."""
    with tempfile.TemporaryDirectory(prefix="rejoinder-benchmark-") as name:
        try:
            side.start(Path(name), len(load))
            progress(f"{side.name}: {len(load)} chats")
            turns, took_s = asyncio.run(_put_on(side, load))
        finally:
            side.stop()
    return figures(turns, took_s)


def figures(turns: Sequence[Turn], took_s: float) -> Row:
    """Times in milliseconds."""
    row: Row = {}
    for name, returning in (("first", False), ("returning", True)):
        times = [turn.ttft_s * 1e3 for turn in turns if turn.returning is returning]
        row[f"ttft_{name}_p50_ms"] = round(percentile(times, 50), 1)
        row[f"ttft_{name}_p99_ms"] = round(percentile(times, 99), 1)
    gaps = [gap * 1e3 for turn in turns for gap in turn.gaps_s]
    row["itl_p50_ms"] = round(percentile(gaps, 50), 2)
    row["itl_p99_ms"] = round(percentile(gaps, 99), 2)
    tokens = sum(turn.answer.tokens for turn in turns)
    row["tokens"], row["took_s"] = tokens, round(took_s, 1)
    row["tok_s"] = round(tokens / took_s, 1)
    return row


def _median(rows: Sequence[Row]) -> Row:
    return {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}


def _ratios(ours: Row, theirs: Row) -> Row:
    times = [key for key in ours if key.endswith("_ms")]
    return {
        "tok_s": round(ours["tok_s"] / theirs["tok_s"], 2),
        **{key.removesuffix("_ms"): round(theirs[key] / ours[key], 2) for key in times},
    }


def measure(options: Options, shape: Shape | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    shape = shape or (QUICK if options.quick else FULL)
    load = draw(shape, SEED)
    about = machine.describe()
    prompt = next(a.system_prompt for a in builtin_assistants() if a.slug == "rejoinder")
    tokenizer = ChatTokenizer(options.model_dir)
    prefix = len(tokenizer.prefix_ids(prompt))
    sides: list[Side] = [Ours(options.model_dir, options.dtype, prompt)]
    if options.extra.llama_server is not None:
        if options.extra.gguf is None:
            raise Refused("--llama-server needs --gguf, the model's file")
        longest = max(
            sum(len(tokenizer.encode_text(turn.question)) + turn.tokens for turn in chat)
            for chat in load
        )
        context = -(-(prefix + longest + MARGIN) // 256) * 256
        binary, gguf = options.extra.llama_server, options.extra.gguf
        sides.append(LlamaServer(binary, gguf, about["threads"], context, prompt))
    rounds: dict[str, list[Row]] = {side.key: [] for side in sides}
    for number in range(ROUNDS[options.quick]):
        for side in sides if number % 2 == 0 else reversed(sides):
            rounds[side.key].append(one_round(side, load))
    rows = [
        {"side": side.key, "version": side.version, **_median(rounds[side.key])} for side in sides
    ]
    result = {
        "model": options.model_name,
        "dtype": options.dtype,
        "machine": about,
        "load": {**asdict(shape), "seed": SEED, "prefix_tokens": prefix},
        "rounds": ROUNDS[options.quick],
        "rows": rows,
    }
    if len(rows) > 1:
        result["vs_llamacpp"] = _ratios(rows[0], rows[1])
    return result


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's `llama-server`")
    parser.add_argument("--gguf", type=Path, help="the model's file for --llama-server")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("serve", __doc__, measure, argv, _add_options)


if __name__ == "__main__":
    sys.exit(main())

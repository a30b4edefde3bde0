"""What opening a long chat costs, while other chats are answered.

A chat of 300 messages of 300 tokens, with code in every third, is asked for over HTTP while 8
chats decode; the whole service runs. `first_ms`: its answers have never been shown, so all are
rendered. `restarted_ms`: as after a restart, nothing is in memory. `again_ms`: it was open before.
Each is a median of wall times from the request to the last byte, `_cpu_ms` of the processor time of
the web process meanwhile, which also feeds the other chats and plays the browser; `rendered` counts
the answers that had to be rendered.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from app.rendering import FinishedHtml
from app.security.login import LOGIN_COOKIE, hash_token
from app.server import yield_to_engine
from benchmarks import machine
from benchmarks.endless import endless_model
from benchmarks.report import Options, Refused, Row, progress, run
from benchmarks.watch import Chats, Served, serving
from sessions.records import Latency

TOKENS = 300  # of each message
PROSE = (
    "The keeper of the lighthouse **climbs** the stairs each evening, counts them, and lights the "
    "lamp; from its gallery one sees the coast, the [harbour](https://example.org/map) and ships. "
)
CODE = """```python
def restore(chat: str, *, method: str = "auto") -> int:
    # Counts the tokens that come back.
    return sum(len(part) for part in load(chat) if part is not None)


class Lamp:
    lit = False

    def light(self) -> None:
        self.lit = True
```
"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    messages: int
    decoding: int
    rounds: int


QUICK = Sizes(messages=300, decoding=8, rounds=3)
FULL = Sizes(messages=300, decoding=8, rounds=9)


def text_of(number: int) -> str:
    """A message of about 300 tokens; every third has code."""
    parts = [f"Message {number}.", PROSE * 2, "- a point\n- another one\n- a third one"]
    parts += [CODE, PROSE] if number % 3 == 2 else [PROSE * 2, PROSE]
    return "\n\n".join(parts)


async def _long_chat(served: Served, messages: int) -> tuple[str, str]:
    """A chat as turns make it, without the model; its path, and its user's cookie."""
    repository = served.services.repository
    token = secrets.token_urlsafe(32)
    user = await repository.create_user(hash_token(token))
    [assistant, *_] = await repository.assistants(user.id)
    version = await repository.assistant_version(assistant.id)
    tokenizer = served.services.api.tokenizer
    prefix_ids = tokenizer.prefix_ids(version.system_prompt)
    prefix = await repository.prefix(version.id, tokenizer.digest, prefix_ids)
    ids = [65] * TOKENS
    chat_id, leaf_id = "", None
    for number in range(0, messages, 2):
        question, answer = text_of(number), text_of(number + 1)
        if not chat_id:
            [turn] = await repository.start_chat(
                user.id,
                prefix.id,
                "A long chat",
                user_text=question,
                user_token_ids=ids,
                sampling={},
            )
            chat_id = turn.chat_id
        else:
            [turn] = await repository.start_turns(
                chat_id, parent_id=leaf_id, user_text=question, user_token_ids=ids, sampling={}
            )
        leaf_id = turn.message_id
        await repository.finish_turn(
            turn.id,
            status="complete",
            finish_reason="eos",
            error=None,
            text=answer,
            token_ids=ids,
            latency=_measured(number),
        )
    return f"/chats/{chat_id}", f"{LOGIN_COOKIE}={token}"


def _measured(number: int) -> Latency:
    """As a returning turn would have it."""
    return Latency(
        queue_ms=1.0,
        restore_ms=38.0,
        restore_io_ms=20.0,
        restore_compute_ms=15.0,
        restore_method="kv",
        restore_bytes=4096,
        prefill_ms=90.0,
        ttft_ms=140.0,
        itl_p50_ms=20.0,
        itl_p95_ms=31.0,
        total_ms=6000.0,
        tokens_in=1000 + number * TOKENS,
        tokens_out=TOKENS,
        prefix_tokens=700,
        resident_tokens=0,
        restored_tokens=number * TOKENS,
        recomputed_tokens=0,
        new_tokens=TOKENS,
        batch_size=8.0,
        restore_plan="3 recompute + 1 hidden + 26 kv",
        restore_predicted_ms=36.0,
        server_ttft_ms=150.0,
    )


async def _open(http: httpx.AsyncClient, path: str, messages: int) -> tuple[float, float, int]:
    """Milliseconds, those of the processor, and the page's bytes. Raises Refused."""
    began, busy = time.perf_counter(), time.process_time()
    response = await http.get(path)
    took, cpu = (time.perf_counter() - began) * 1e3, (time.process_time() - busy) * 1e3
    shown = response.text.count('class="message message--')
    if response.status_code != 200 or shown != messages:
        raise Refused(f"the page has {shown} of {messages} messages ({response.status_code})")
    return took, cpu, len(response.content)


async def _measure(options: Options, sizes: Sizes, directory: Path) -> Row:
    model_dir = endless_model(options.model_dir, directory)
    progress("starting the service")
    async with serving(model_dir, directory / "data", options.dtype) as served:
        yield_to_engine()
        progress("a long chat is made")
        path, cookie = await _long_chat(served, sizes.messages)
        finished = served.services.finished
        chats = Chats(served.services, sizes.decoding)
        await chats.begin()
        progress("it is opened")
        times: dict[str, list[float]] = {"first": [], "restarted": [], "again": []}
        cpus: dict[str, list[float]] = {kind: [] for kind in times}
        rendered = dict.fromkeys(times, 0)
        url = f"http://127.0.0.1:{served.port}"
        num_bytes = 0
        async with httpx.AsyncClient(base_url=url, headers={"Cookie": cookie}, timeout=60) as http:
            for number in range(sizes.rounds):
                for kind, taken in times.items():
                    if kind == "first" and number:
                        continue  # it was shown
                    if kind != "again":
                        await finished.close()  # what was rendered is stored
                        finished.cache = FinishedHtml()
                    before = finished.cache.num_rendered
                    took, cpu, num_bytes = await _open(http, path, sizes.messages)
                    taken.append(took)
                    cpus[kind].append(cpu)
                    rendered[kind] += finished.cache.num_rendered - before
                    chats.check()
        if rendered["restarted"] or rendered["again"]:
            raise Refused(f"answers were rendered again: {rendered}")
        itl_ms = await chats.itl_ms(1.0)
    return {
        **{f"{kind}_ms": round(statistics.median(taken), 1) for kind, taken in times.items()},
        **{f"{kind}_cpu_ms": round(statistics.median(some), 1) for kind, some in cpus.items()},
        "restarted_min_ms": round(min(times["restarted"]), 1),
        "rendered": rendered,
        "page_bytes": num_bytes,
        "itl_ms": round(itl_ms, 1),
    }


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    sizes = sizes or (QUICK if options.quick else FULL)
    with tempfile.TemporaryDirectory(prefix="rejoinder-benchmark-") as name:
        result = asyncio.run(_measure(options, sizes, Path(name)))
    return {
        "model": options.model_name,
        "dtype": options.dtype,
        "machine": machine.describe(),
        "messages": sizes.messages,
        "tokens": TOKENS,
        "decoding": sizes.decoding,
        **result,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("opening", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

"""What watching costs: decoding with every chat on a screen, over decoding with none watched.

The whole service runs: web process, engine process, and the browsers as a third one, which only
reads. All chats decode together the whole time (the model's end token is another one, so that no
answer ends); windows with and without watchers take turns, so both sides see the same text and the
same contexts. ITL is the time between a chat's first and last token of a window over the number of
its tokens; each step gives every chat one.

`itl_ratio`: watched over unwatched, the median of the pairs of neighbouring windows.
`busy_itl_ratio`: the same for a web process that never rests, over an idle one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvicorn

from app.main import create_app
from app.security.login import LOGIN_COOKIE, hash_token
from app.server import yield_to_engine
from app.services import Services
from app.settings import load_settings
from app.streams import LiveTurn
from benchmarks import machine
from benchmarks.endless import endless_model
from benchmarks.report import Options, Refused, Row, progress, run
from sessions.migrate import upgrade

QUESTIONS = (
    "Write a long guide to baking bread, with headings, lists and a table of flours.",
    "Write a Python module that reads a log file and counts its lines, and explain each part.",
    "Tell the story of a lighthouse keeper, in many paragraphs.",
    "Explain how a bicycle works, step by step, as a numbered list with short paragraphs.",
)
LENGTH = 4096  # tokens; no answer gets there
SPIN_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    chats: int
    pairs: int  # of windows, for each ratio
    window_s: float
    settle_s: float  # after a change: all browsers connect at once, which they never do in life


QUICK = Sizes(chats=32, pairs=4, window_s=2.0, settle_s=1.0)
FULL = Sizes(chats=32, pairs=12, window_s=1.5, settle_s=0.5)
KV_MIB = 3072  # all that the chats say meanwhile; nobody is preempted


@dataclass(frozen=True)
class Served:
    """The running service."""

    services: Services
    port: int


@asynccontextmanager
async def serving(model_dir: Path, directory: Path, dtype: str) -> AsyncIterator[Served]:
    """The service on a free port, with a database of its own."""
    settings = load_settings(
        {
            "data_dir": str(directory),
            "model": str(model_dir),
            "dtype": dtype,
            "port": "0",
            # Named, so that nothing of the machine has to be measured before they are chosen.
            "checkpoint_method": "kv",
            "share_prefix": "always",
            "speculation": "never",
            "kv_memory_mib": str(KV_MIB),
        }
    )
    upgrade(settings.database_path, settings.backup_dir, progress)
    app = create_app(settings)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            raise Refused("the service did not start")
        await asyncio.sleep(0.05)
    try:
        yield Served(app.state.services, listener.getsockname()[1])
    finally:
        app.state.services.hub.end_streams()
        server.should_exit = True
        await task
        listener.close()


class Watchers:
    """The process of the browsers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, port: int) -> Watchers:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "benchmarks.watchers",
                str(port),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def watch(self, streams: Sequence[tuple[str, str]]) -> dict[str, int]:
        """Watch these and leave all others; returns what those had brought."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(streams).encode() + b"\n")
        answer = await self._process.stdout.readline()
        return msgspec.json.decode(answer, type=dict[str, int])

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Chats:
    """Chats that all decode, one user and one browser each."""

    def __init__(self, services: Services, count: int) -> None:
        self._services = services
        self._count = count
        self.turns: list[LiveTurn] = []
        self.streams: list[tuple[str, str]] = []  # path and cookie
        self._arrivals: list[tuple[float, int]] = []  # at the first chat: when, tokens so far

    async def begin(self) -> None:
        """Start them, and wait until each has had its first tokens."""
        repository = self._services.repository
        with closing(sqlite3.connect(self._services.settings.database_path)) as db:
            db.execute("UPDATE assistant SET sampling = ?", (json.dumps({"max_tokens": LENGTH}),))
            db.commit()
        for number in range(self._count):
            token = secrets.token_urlsafe(32)
            user = await repository.create_user(hash_token(token))
            assistants = await repository.assistants(user.id)
            turn = await self._services.chat.start_chat(
                user.id,
                assistants[number % len(assistants)].id,
                QUESTIONS[number % len(QUESTIONS)],
                received_at=time.monotonic(),
            )
            live = self._services.hub.get(turn.id)
            assert live is not None
            self.turns.append(live)
            self.streams.append((f"/turns/{turn.id}/events", f"{LOGIN_COOKIE}={token}"))
        while not all(len(one.token_ids) > 1 for one in self.turns):
            self.check()
            await asyncio.sleep(0.1)
        self._time_arrivals(self.turns[0])

    def check(self) -> None:
        """Raises Refused when an answer has ended: the batch is no longer the same."""
        ended = sum(one.finished for one in self.turns)
        if ended:
            raise Refused(f"{ended} of {len(self.turns)} answers ended during the measurement")

    async def itl_ms(self, window_s: float) -> float:
        """Milliseconds between two tokens of a chat, over a window. Raises Refused."""
        self._arrivals.clear()
        await asyncio.sleep(window_s)
        self.check()
        if len(self._arrivals) < 3:
            raise Refused(f"only {len(self._arrivals)} tokens came during a window")
        (began, before), (ended, after) = self._arrivals[0], self._arrivals[-1]
        return (ended - began) * 1e3 / (after - before)

    def _time_arrivals(self, turn: LiveTurn) -> None:
        append = turn.append

        def timed(text: str, token_ids: Iterable[int]) -> None:
            append(text, token_ids)
            self._arrivals.append((time.perf_counter(), len(turn.token_ids)))

        turn.append = timed  # type: ignore[method-assign]  # of this one turn


def _pairs(itl: dict[bool, list[float]]) -> list[Row]:
    return [
        {"without_ms": round(off, 2), "with_ms": round(on, 2), "ratio": round(on / off, 3)}
        for on, off in zip(itl[True], itl[False], strict=True)
    ]


async def _spin(stop: asyncio.Event) -> None:
    """Keep the event loop at work, as many requests would."""
    while not stop.is_set():
        until = time.perf_counter() + SPIN_S
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)


async def _watched(chats: Chats, watchers: Watchers, sizes: Sizes) -> Row:
    itl: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    events = num_bytes = 0
    for number in range(2 * sizes.pairs):
        on = number % 4 in (1, 2)
        brought = await watchers.watch(chats.streams if on else [])
        events, num_bytes = events + brought["events"], num_bytes + brought["bytes"]
        while not all(bool(one.watchers) is on for one in chats.turns):
            await asyncio.sleep(0.05)
        await asyncio.sleep(sizes.settle_s)
        busy = time.process_time()
        itl[on].append(await chats.itl_ms(sizes.window_s))
        cpu[on].append((time.process_time() - busy) / sizes.window_s)
    brought = await watchers.watch([])
    events, num_bytes = events + brought["events"], num_bytes + brought["bytes"]
    if events < sizes.pairs * len(chats.turns):
        raise Refused(f"the watchers saw only {events} events")
    ratios = [watched / alone for watched, alone in zip(itl[True], itl[False], strict=True)]
    return {
        "itl_ratio": round(statistics.median(ratios), 3),
        "watching": _pairs(itl),
        "unwatched_itl_ms": round(statistics.median(itl[False]), 2),
        "watched_itl_ms": round(statistics.median(itl[True]), 2),
        "unwatched_web_cores": round(statistics.median(cpu[False]), 3),
        "watched_web_cores": round(statistics.median(cpu[True]), 3),
        "events": events,
        "event_bytes": num_bytes,
    }


async def _busy(chats: Chats, sizes: Sizes) -> Row:
    itl: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * sizes.pairs):
        on = number % 4 in (1, 2)
        stop = asyncio.Event()
        spinning = asyncio.create_task(_spin(stop)) if on else None
        await asyncio.sleep(sizes.settle_s / 4)
        itl[on].append(await chats.itl_ms(sizes.window_s / 2))
        stop.set()
        if spinning is not None:
            await spinning
    ratios = [busy / idle for busy, idle in zip(itl[True], itl[False], strict=True)]
    return {
        "busy_itl_ratio": round(statistics.median(ratios), 3),
        "busy": _pairs(itl),
    }


async def _measure(options: Options, sizes: Sizes, directory: Path) -> Row:
    model_dir = endless_model(options.model_dir, directory)
    progress("starting the service")
    async with serving(model_dir, directory / "data", options.dtype) as served:
        yield_to_engine()
        watchers = await Watchers.start(served.port)
        try:
            chats = Chats(served.services, sizes.chats)
            progress(f"{sizes.chats} chats begin")
            await chats.begin()
            progress("windows with and without watchers")
            watched = await _watched(chats, watchers, sizes)
            progress("windows with a busy web process")
            busy = await _busy(chats, sizes)
        finally:
            await watchers.end()
        return {**watched, **busy, "tokens": max(len(one.token_ids) for one in chats.turns)}


def measure(options: Options, sizes: Sizes | None = None) -> Row:
    """Run it; returns the result. Raises Refused."""
    sizes = sizes or (QUICK if options.quick else FULL)
    about = machine.describe()
    with tempfile.TemporaryDirectory(prefix="rejoinder-benchmark-") as name:
        result = asyncio.run(_measure(options, sizes, Path(name)))
    return {
        "model": options.model_name,
        "dtype": options.dtype,
        "machine": about,
        "chats": sizes.chats,
        "window_s": sizes.window_s,
        **result,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("watch", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

"""A soak: 64 people over real HTTP, a memory far too small, a server that is killed twice.

`python -m tests.e2e.soak [--seconds 300] [--clients 64] [--seed 0] [--report FILE]` prints a report
and ends with 1 when anything was lost, wrong, leaked or unexplained; the file has the report and,
after it, the server's `/metrics` at the end. The model is a tiny random one in fp32, the
answers are greedy, and the reference is transformers over the ids in the database.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import sqlite3
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from app.check import check_data
from app.settings import load_settings
from sessions.migrate import upgrade
from tests.e2e.server_process import ServerProcess
from tests.e2e.soak_clients import Person, World
from tests.e2e.soak_judge import (
    Verdict,
    judge_answers,
    judge_coverage,
    judge_log,
    judge_memory,
    judge_messages,
    judge_pages,
)
from tests.engine.harness import make_tiny_model

RUN = "from app.cli import main; main()"
MAX_TOKENS = 48
ASSISTANTS = {
    "a" * 32: "You are patient. You answer what was asked and nothing else, in short sentences.",
    "c" * 32: "You know maps, harbours and bridges. You never make up a date. " * 3,
}
IDLE_EVICT_S = 3
# 64 chats of some 500 tokens do not fit: 96 pages hold 6,144
OPTIONS = ["--dtype", "fp32", "--kv-memory-mib", "18", "--idle-evict-s", str(IDLE_EVICT_S)]
# a small cache in host memory, so that most chats come back from the disk
OPTIONS += ["--host-cache-mib", "8", "--staging-mib", "16"]
OPTIONS += ["--checkpoint-cap-mib", "48", "--max-queue", "32", "--log-level", "info"]
METHODS = ("hidden", "kv", "auto")  # of the server's three lives
START_S = 600.0
COUNTED = {
    "evictions": "evictions_total",
    "preemptions": "num_preemptions_total",
    "tokens restored": "engine_tokens_restored_total",
    "tokens restored from host memory": "host_cache_tokens_restored_total",
    "tokens recomputed": "engine_tokens_recomputed_total",
    "stripes written": "checkpoint_stripes_written_total",
    "stripes rejected": "checkpoint_stripes_rejected_total",
    "stripes dropped": "checkpoint_staging_drops_total",
}


class Soak:
    """One run: its server's lives, its clients, and what came of it."""

    def __init__(self, root: Path, seconds: float, clients: int, seed: int) -> None:
        self._root = root
        self._data = root / "data"
        self._seconds = seconds
        self._clients = clients
        self._seed = seed
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._model = make_tiny_model(root / "model", num_kv_heads=2)
        self._logs: list[Path] = []
        self._server: ServerProcess | None = None
        self._memory: list[list[tuple[float, float]]] = [[]]
        self.figures = ""  # of the last life, at rest
        self.verdict = Verdict()

    def run(self) -> Verdict:
        """All of it; takes the given seconds and what starts, waits and judging take."""
        _make_database(self._data)
        try:
            world = asyncio.run(self._live())
        finally:
            if self._server is not None:
                self._server.stop()
        database = self._data / "rejoinder.db"
        verdict = self.verdict
        verdict.counts.update(world.counts)
        verdict.wrong += world.trouble
        judge_memory(self._memory, verdict)
        judge_messages(database, world, verdict)
        judge_answers(database, self._model, verdict)
        for log in self._logs:
            judge_log(log, verdict)
        options = {"data_dir": str(self._data), "checkpoint_cap_mib": "48"}
        findings = check_data(load_settings(options), repair=False)
        verdict.wrong += [f"check: {fault}" for fault in findings.faults]
        judge_coverage(self._seconds, verdict)
        return verdict

    def _start(self, life: int) -> None:
        log = self._root / f"log{life}"
        self._logs.append(log)
        command = ["-c", RUN, "serve", "--port", str(self._port), "--data-dir", str(self._data)]
        command += ["--model", str(self._model), "--checkpoint-method", METHODS[life], *OPTIONS]
        self._server = ServerProcess(command, log, wait_s=START_S)

    async def _live(self) -> World:
        await asyncio.to_thread(self._start, 0)
        assert self._server is not None
        world = World(self._server.url, asyncio.Event())
        loop = asyncio.get_running_loop()
        world.up.set()
        world.ends_at = loop.time() + self._seconds
        people = [
            asyncio.create_task(Person(world, 1000 * self._seed + n, list(ASSISTANTS)).live())
            for n in range(self._clients)
        ]
        sampler = asyncio.create_task(self._sample())
        for life in (1, 2):
            await asyncio.sleep(self._seconds / 3)
            # the clients' time stands still while there is no server
            left = world.ends_at - loop.time()
            await self._note_figures(world.url)
            world.up.clear()
            world.killed_at = loop.time()
            os.kill(self._server.pid, signal.SIGKILL)
            await asyncio.to_thread(self._server.stop)
            self._memory.append([])
            world.ends_at = loop.time() + 10 * START_S
            await asyncio.to_thread(self._start, life)
            world.killed_at = loop.time()
            world.ends_at = loop.time() + left
            world.up.set()
        await asyncio.gather(*people)
        sampler.cancel()
        await self._come_to_rest(world)
        return world

    async def _sample(self) -> None:
        """Resident bytes of the web process and of its engine, every second."""
        while True:
            await asyncio.sleep(1)
            try:
                assert self._server is not None
                web = psutil.Process(self._server.pid)
                [engine] = web.children()
                self._memory[-1].append((web.memory_info().rss, engine.memory_info().rss))
            except (psutil.Error, ValueError):
                continue  # it is being started

    async def _come_to_rest(self, world: World) -> None:
        """Nothing runs any more, idle chats have left memory: count the pages."""
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient(base_url=world.url, timeout=60, trust_env=False) as http:
            while True:
                state = (await http.get("/readyz")).json()
                if state.get("running") == 0 and state.get("waiting") == 0:
                    break
                assert time.monotonic() < deadline, f"the server does not come to rest: {state}"
                await asyncio.sleep(0.5)
            await asyncio.sleep(2 * IDLE_EVICT_S)
        await self._note_figures(world.url)
        free, total = (
            figure(self.figures, name) for name in ("kv_cache_free_pages", "kv_cache_pages")
        )
        judge_pages(self._data / "rejoinder.db", total, free, self.verdict)

    async def _note_figures(self, url: str) -> None:
        """Read the figures of a life before it ends, and add up what the engine did in it."""
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            self.figures = (await http.get("/metrics")).text
        for name, metric in COUNTED.items():
            self.verdict.counts[f"engine: {name}"] += figure(self.figures, metric)


def figure(figures: str, name: str) -> int:
    """The number of a metric without labels, its prefix left out."""
    [found] = re.findall(rf"^rejoinder_{name} (\S+)$", figures, re.MULTILINE)
    return int(float(found))


def _make_database(data: Path) -> None:
    """A database with two assistants that answer greedily."""
    data.mkdir(parents=True)
    upgrade(data / "rejoinder.db", data / "backups", lambda line: None)
    now = datetime.now(UTC).isoformat()
    with closing(sqlite3.connect(data / "rejoinder.db")) as db, db:
        for position, (assistant, prompt) in enumerate(ASSISTANTS.items()):
            db.execute(
                "INSERT INTO assistant (id, name, description, greeting, sampling, published,"
                " position, created_at) VALUES (?, ?, '', '', ?, 1, ?, ?)",
                (
                    assistant,
                    f"Assistant {position}",
                    f'{{"temperature": 0.0, "max_tokens": {MAX_TOKENS}}}',
                    position,
                    now,
                ),
            )
            db.execute(
                "INSERT INTO assistant_version (id, assistant_id, number, system_prompt,"
                " created_at) VALUES (?, ?, 1, ?, ?)",
                (assistant[::-1][:31] + "f", assistant, prompt, now),
            )


def report(soak: Verdict, seconds: float, clients: int, seed: int) -> str:
    """A page of text."""
    lines = [f"soak of {seconds:.0f} s, {clients} clients, seed {seed}, 2 kills"]
    by_group: dict[str, list[str]] = {}
    for name, count in sorted(soak.counts.items()):
        group, _, rest = name.partition(": ") if ": " in name else ("clients and answers", "", name)
        by_group.setdefault(group, []).append(f"{rest} {count:,}")
    for group, members in by_group.items():
        lines += textwrap.wrap(
            f"{group}: " + ", ".join(members), 100, initial_indent="  ", subsequent_indent="    "
        )
    lines += [f"WRONG: {one}" for one in soak.wrong[:40]]
    lines.append("nothing is wrong" if not soak.wrong else f"{len(soak.wrong)} things are wrong")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="run in this directory and leave all there")
    parser.add_argument("--report", type=Path, help="write the report and the figures there")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rejoinder-soak-") as name:
        root = chosen.keep or Path(name)
        root.mkdir(parents=True, exist_ok=True)
        soak = Soak(root, chosen.seconds, chosen.clients, chosen.seed)
        verdict = soak.run()
    text = report(verdict, chosen.seconds, chosen.clients, chosen.seed)
    print(text)
    if chosen.report is not None:
        chosen.report.write_text(f"{text}\n\n# /metrics at the end\n\n{soak.figures}")
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

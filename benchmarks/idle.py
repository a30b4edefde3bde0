"""Whether a server starts and opens a chat as fast with many idle chats on disk as with few.

For each number of idle chats a data directory is made through the repository and the chunk store:
each chat has a question, an answer and one small stripe. Then, in milliseconds of the fastest of
several tries: `store_open` (after a clean end), `store_find` (one chat looked up and read in a
store just opened), `store_save` (the first stripe durable after a start), `database_open` (with
what a start mends), `chat_open` (a chat and its path) and `chat_list` (the first page of the side
bar). `check_s` is the whole check, which may grow. `rows` has one row a number; `growth` is each
figure at the largest number over that at the smallest, `cpu_growth` the same of CPU time, on which
other programs have less of a hold. Refused when a chat does not come back.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.machine import describe
from benchmarks.report import Options, Refused, Row, progress, run
from sessions.chunks import ChunkStore, check
from sessions.database import Database
from sessions.migrate import upgrade
from sessions.records import AssistantSeed
from sessions.repository import Repository

QUICK = (10, 300, 1_000)
FULL = (10, 1_000, 10_000)
TRIES = 7
CAP_BYTES = 1 << 40
TOKENS = 64
STRIPE_BYTES = 2048
AT_ONCE = 256  # chats made side by side
FINGERPRINT = b"idle"
PARENT = bytes(16)
SECONDS = 600.0

T = TypeVar("T")

Taken = dict[str, list[tuple[float, float]]]  # wall and CPU seconds of each try


def measure(options: Options) -> Row:
    """Run it; returns the result. Raises Refused."""
    rows: list[Row] = []
    cpu: list[dict[str, float]] = []
    for number in QUICK if options.quick else FULL:
        progress(f"{number} idle chats")
        with tempfile.TemporaryDirectory(prefix="rejoinder-benchmark-") as name:
            row, cpu_ms = asyncio.run(_one(Path(name), number))
        rows.append(row)
        cpu.append(cpu_ms)
    figures = list(cpu[0])
    return {
        "machine": describe(),
        "rows": rows,
        "growth": {
            name: round(rows[-1][f"{name}_ms"] / rows[0][f"{name}_ms"], 2) for name in figures
        },
        "cpu_growth": {name: round(cpu[-1][name] / cpu[0][name], 2) for name in figures},
    }


async def _one(root: Path, number: int) -> tuple[Row, dict[str, float]]:
    """All figures with so many idle chats; those of CPU time beside them, in milliseconds."""
    began = time.perf_counter()
    user_id, chats = await _fill(root, number)
    made_s = time.perf_counter() - began
    taken: Taken = {}
    for serial in range(TRIES):
        chat_id = chats[serial * (len(chats) - 1) // (TRIES - 1)]
        await _try(root, user_id, chat_id, serial, taken)
    began = time.perf_counter()
    report = check([root / "chunks"])
    check_s = time.perf_counter() - began
    if report.problems:
        raise Refused(f"the check found {report.problems[0]}")
    row: Row = {"chats": number}
    row |= {f"{name}_ms": round(1e3 * min(w for w, _ in tries), 2) for name, tries in taken.items()}
    row |= {"check_s": round(check_s, 2), "made_s": round(made_s, 1)}
    return row, {name: 1e3 * min(c for _, c in tries) for name, tries in taken.items()}


async def _try(root: Path, user_id: str, chat_id: str, serial: int, taken: Taken) -> None:
    """Start once, open one chat, save one, end."""

    async def timed(name: str, action: Callable[[], Awaitable[T]]) -> T:
        wall, cpu = time.perf_counter(), time.process_time()
        result = await action()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        taken.setdefault(name, []).append(spent)
        return result

    async def open_store() -> ChunkStore:
        return ChunkStore([root / "chunks"], CAP_BYTES)

    async def open_database() -> Database:
        database = await Database.open(root / "rejoinder.db")
        await Repository(database).interrupt_running()
        return database

    store = await timed("store_open", open_store)
    with closing(store):

        async def find() -> bool:
            return _reads_back(store, chat_id)

        async def save() -> bool:
            saved = threading.Event()
            _save(store, f"new-{serial}", lambda durable: saved.set())
            return saved.wait(SECONDS)

        if not await timed("store_find", find):
            raise Refused(f"chat {chat_id} did not come back")
        if not await timed("store_save", save):
            raise Refused("a stripe could not be saved")
    database = await timed("database_open", open_database)
    try:
        repository = Repository(database)

        async def open_chat() -> int:
            assert await repository.chat(user_id, chat_id) is not None
            return len(await repository.path(chat_id))

        if await timed("chat_open", open_chat) != 2:
            raise Refused(f"chat {chat_id} has lost messages")
        if not await timed("chat_list", lambda: repository.chats(user_id)):
            raise Refused("the list of chats is empty")
    finally:
        await database.close()


async def _fill(root: Path, number: int) -> tuple[str, list[str]]:
    """Make the data directory; the user and the ids of the chats."""
    upgrade(root / "rejoinder.db", root / "backups")
    database = await Database.open(root / "rejoinder.db")
    store = ChunkStore([root / "chunks"], CAP_BYTES)
    try:
        repository = Repository(database)
        user = await repository.create_user("hash")
        seed = AssistantSeed(
            slug="a", name="A", description="", greeting="", system_prompt="Help.", sampling={}
        )
        await repository.sync_builtin_assistants([seed])
        [assistant] = await repository.assistants(None)
        version = await repository.assistant_version(assistant.id)
        prefix = await repository.prefix(version.id, "tokenizer", [1, 2, 3])

        async def make(serial: int) -> str:
            [turn] = await repository.start_chat(
                user.id,
                prefix.id,
                f"Chat {serial}",
                user_text=f"Question {serial}? " * 8,
                user_token_ids=[serial] * 32,
                sampling={},
            )
            await repository.finish_turn(
                turn.id,
                status="complete",
                finish_reason="eos",
                error=None,
                text=f"Answer {serial}. " * 40,
                token_ids=[serial] * 200,
                latency=None,
            )
            return turn.chat_id

        chats: list[str] = []
        for first in range(0, number, AT_ONCE):
            serials = range(first, min(number, first + AT_ONCE))
            made = await asyncio.gather(*(make(serial) for serial in serials))
            for chat_id in made:
                _save(store, chat_id)
            if not store.flush(SECONDS):
                raise Refused("the stripes could not be saved")
            chats += made
    finally:
        store.close()
        await database.close()
    return user.id, chats


def _ids(chat_id: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Token ids that tell this chat from all others."""
    seed = int.from_bytes(hashlib.blake2b(chat_id.encode(), digest_size=4).digest(), "little")
    return np.random.default_rng(seed).integers(0, 49152, TOKENS, dtype=np.int32)


def _save(
    store: ChunkStore, chat_id: str, done: Callable[[bool], None] = lambda durable: None
) -> None:
    store.append(
        owner=f"c-{chat_id}",
        fingerprint=FINGERPRINT,
        start=0,
        parent_digest=PARENT,
        ids=_ids(chat_id),
        chunks=[(0, "kv", "bf16")],
        payload=[np.resize(_ids(chat_id).view(np.uint8), STRIPE_BYTES)],
        done=done,
    )


def _reads_back(store: ChunkStore, chat_id: str) -> bool:
    """One chat's stripe is found and read, and is what was saved."""
    [ref] = store.find(f"c-{chat_id}", FINGERPRINT, [(0, PARENT, _ids(chat_id))])
    if ref is None:
        return False
    stream = store.read(f"c-{chat_id}", [ref], budget_bytes=1 << 20)
    stripes = stream.poll(SECONDS)
    payload = stripes[0].payload if stripes else None
    expected = np.resize(_ids(chat_id).view(np.uint8), STRIPE_BYTES)
    return payload is not None and bool(np.array_equal(payload, expected))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    return run("idle", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())

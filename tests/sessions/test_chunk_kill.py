"""The writer ends between any two of its steps; the next start finds what was durable."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sessions.chunks import ChunkStore
from tests.sessions.chunk_support import (
    FINGERPRINT,
    STRIPE_BYTES,
    Killed,
    assert_clean,
    bytes_on_disk,
    chunk_files,
    end,
    memory_directory,
    restore,
    save,
    token_ids,
)

TRUNK = token_ids(1, 150)
BRANCH = np.concatenate([TRUNK[:30], token_ids(2, 4)])
PREFIX = token_ids(3, 40)
OTHER = token_ids(4, 128)
CAP = 7 * STRIPE_BYTES


class Recorder:
    """Lists the writer's steps, checks the cap at each, and ends it at a given one."""

    def __init__(self, dirs: list[Path], kill_at: int | None) -> None:
        self.dirs = dirs
        self.kill_at = kill_at
        self.steps: list[str] = []

    def __call__(self, step: str) -> None:
        assert bytes_on_disk(self.dirs) <= CAP, step
        self.steps.append(step)
        if len(self.steps) - 1 == self.kill_at:
            raise Killed(step)


def life(dirs: list[Path], hook: Callable[[str], None]) -> dict[str, list[bool]]:
    """Every kind of write there is; what was reported durable, by owner."""
    durable: dict[str, list[bool]] = {}
    store = ChunkStore(dirs, CAP, hook=hook)

    def put(owner: str, *args: object, **kwargs: object) -> None:
        done = durable.setdefault(owner, []).append
        save(store, owner, *args, done=done, **kwargs)  # type: ignore[arg-type]
        store.flush(10.0)

    def put_together() -> None:
        """One group of three stripes of two owners: the writer waits until all are queued."""
        held, queued = threading.Event(), threading.Event()

        def hold(ok: bool) -> None:
            held.set()
            if ok:
                queued.wait(10.0)

        save(store, "c-0", OTHER[:1], done=hold)
        assert held.wait(10.0)
        save(store, "c-2", OTHER)
        save(store, "c-3", OTHER[:64])
        queued.set()
        store.flush(10.0)

    for n in (20, 40, 50, 64):
        put("c-1", TRUNK[:n])
    put("p-1", PREFIX)
    put("c-1", BRANCH)
    store.compact()
    put("c-stale", OTHER[:64], fingerprint=b"weights-0")
    store.collect(FINGERPRINT)
    store.flush(10.0)
    put_together()
    put("c-4", OTHER[:64])  # one of the owners above has to go
    store.forget(["c-3"])
    store.flush(10.0)
    store.close()
    return durable


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with memory_directory(tmp_path) as directory:
        yield directory


def all_steps() -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        dirs = [Path(name) / "a", Path(name) / "b"]
        recorder = Recorder(dirs, None)
        life(dirs, recorder)
        return recorder.steps


STEPS = all_steps()


def test_the_life_under_test_has_every_step() -> None:
    assert set(STEPS) == {
        "settle",
        "reserve",
        "create",
        "write",
        "fsync",
        "fsync.dir",
        "commit",
        "committed",
        "delete.commit",
        "delete.unlink",
        "collect.commit",
        "collect.unlink",
        "compact.copy",
        "compact.fsync",
        "compact.commit",
        "compact.unlink",
        "close",
    }


@pytest.mark.parametrize("kill_at", range(len(STEPS)))
def test_killed_before_a_step(root: Path, kill_at: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    dirs = [root / "a", root / "b"]
    recorder = Recorder(dirs, kill_at)
    durable = life(dirs, recorder)
    assert recorder.steps == STEPS[: kill_at + 1]

    store = ChunkStore(dirs, CAP)
    assert store.flush(10.0)
    assert store.bytes_used == bytes_on_disk(dirs) <= CAP
    came_back = {
        owner: restore(store, owner, ids)
        for owner, ids in (
            ("p-1", PREFIX),
            ("c-1", TRUNK),
            ("c-2", OTHER),
            ("c-3", OTHER),
            ("c-4", OTHER[:64]),
        )
    }
    assert restore(store, "c-1", BRANCH) in (0, 20, 30, 34)
    assert restore(store, "c-stale", OTHER) == 0
    if durable.get("p-1") == [True]:
        assert came_back["p-1"] == 40  # prefixes are evicted last: never in this life
    evicting = "delete.commit" in recorder.steps
    saved = [n for n, ok in zip((20, 40, 50, 64), durable.get("c-1", []), strict=False) if ok]
    assert came_back["c-1"] >= max(saved, default=0) or evicting
    # an answer saved after the restart is there after the next one
    longer = np.concatenate([TRUNK, token_ids(9, 20)])
    save(store, "c-1", longer)
    assert store.flush(10.0)
    assert restore(store, "c-1", longer) == 170
    end(store, dirs)
    store = ChunkStore(dirs, CAP)
    assert restore(store, "c-1", longer) == 170
    end(store, dirs)


def test_forgotten_before_the_kill_stays_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)

    def hook(step: str) -> None:
        if step == "delete.unlink":
            raise Killed

    store = ChunkStore([tmp_path], CAP, hook=hook)
    save(store, "c-1", OTHER)
    assert store.flush(10.0)
    store.forget(["c-1"])
    assert not store.flush(10.0)
    store.close()
    assert len(chunk_files([tmp_path])) == 1
    store = ChunkStore([tmp_path], CAP)
    assert restore(store, "c-1", OTHER) == 0
    assert end(store, [tmp_path]).owners == 0
    assert chunk_files([tmp_path]) == []


def test_a_dead_writer_drops_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def hook(step: str) -> None:
        if step == "write":
            raise ZeroDivisionError

    store = ChunkStore([tmp_path], CAP, hook=hook)
    results: list[bool] = []
    save(store, "c-1", OTHER, done=results.append)
    assert not store.flush(10.0)
    save(store, "c-1", OTHER, done=results.append)
    assert results == [False] * 4
    assert store.stripes_dropped == 4
    assert "nothing more is saved" in caplog.text
    assert "writer of checkpoints failed" in store.write_trouble
    assert restore(store, "c-1", OTHER) == 0
    store.close()
    end(ChunkStore([tmp_path], CAP), [tmp_path])


CHILD = """
import sys
import tempfile
import threading
from pathlib import Path
from sessions.chunks import ChunkStore
from tests.sessions.chunk_support import save, token_ids
store = ChunkStore([Path(sys.argv[1])], 1 << 24)
for n in range(10_000):
    results = []
    save(store, f"c-{n % 7}", token_ids(n % 7, 4 * (n // 7 + 1)), done=results.append)
    store.flush(10.0)
    assert all(results)
    print(n, flush=True)
"""


@pytest.mark.parametrize("acknowledged", [1, 10, 40])
def test_sigkill(tmp_path: Path, acknowledged: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    last = -1
    with child:
        while last < acknowledged:
            last = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        for line in child.stdout.read().splitlines():
            last = int(line)
    store = ChunkStore([tmp_path], 1 << 24)
    for owner in range(7):
        rounds = len(range(owner, last + 1, 7))
        assert restore(store, f"c-{owner}", token_ids(owner, 4 * rounds)) == 4 * rounds
    end(store, [tmp_path])
    assert_clean([tmp_path])

"""What happens to the checkpoints costs time, never an answer (fp32, greedy).

Oracle: transformers' own generation over the same ids.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import sessions.chunks.index
import sessions.chunks.layout
from sessions.chunks import ChunkStore, check, state
from sessions.chunks.disk_space import Space
from tests.engine.harness import Harness, HarnessFactory, Oracle, make_tiny_model, random_ids

PREFIX = random_ids(100, 1)


def turn(harness: Harness, history: list[int], new: list[int], chat: str = "a") -> str:
    """Run one turn; the id of its request."""
    request = harness.submit(
        new, chat=chat, prefix=PREFIX, history=history, computed=max(0, len(history) - 1)
    )
    harness.run()
    return request


def store_of(harness: Harness) -> ChunkStore:
    assert isinstance(harness.store, ChunkStore)
    return harness.store


def saved_chat(make_engine: HarnessFactory, disk: Path, length: int = 300) -> list[int]:
    """The ids of a chat that an engine saved before it ended."""
    harness = make_engine(disk=disk)
    first = random_ids(length, 2)
    history = first + harness.ids(turn(harness, [], first))
    make_engine.close(harness)
    return history


def test_a_full_disk_costs_checkpoints_not_answers(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_engine(disk=tmp_path)
    with monkeypatch.context() as full:
        full.setattr(state, "measure", lambda directory: Space(0, 1 << 40))
        first = random_ids(300, 2)
        request = turn(harness, [], first)
        assert harness.ids(request) == oracle.greedy(PREFIX + first, 12)
        assert store_of(harness).flush(10.0)
        assert harness.engine.stats().stripes_dropped > 0
        assert store_of(harness).write_trouble == "No space left on device"
        history = first + harness.ids(request)
    other = random_ids(200, 3)  # there is room again
    turn(harness, [], other, "b")
    assert store_of(harness).flush(10.0)
    assert store_of(harness).write_trouble == ""
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    new = random_ids(9, 4)
    request = turn(harness, history, new)
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
    assert harness.done(request).stats.recomputed_tokens == len(history) - 1
    make_engine.close(harness)
    assert check([tmp_path]).problems == []


def test_the_chunk_directory_is_removed_while_chats_run(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    disk = tmp_path / "chunks"
    history = saved_chat(make_engine, disk)
    harness = make_engine(disk=disk)
    shutil.rmtree(disk)
    new = random_ids(9, 4)
    request = turn(harness, history, new)
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
    assert harness.done(request).stats.recomputed_tokens == len(history) - 1
    history += new + harness.ids(request)
    assert store_of(harness).flush(10.0)
    # what is answered from now on is saved again, in a directory made anew
    first = random_ids(200, 5)
    other = first + harness.ids(turn(harness, [], first, "b"))
    make_engine.close(harness)
    harness = make_engine(disk=disk)
    for chat, ids in (("a", history), ("b", other)):
        request = turn(harness, ids, new, chat)
        assert harness.ids(request) == oracle.greedy(PREFIX + ids + new, 12)
    assert harness.done(request).stats.restored_tokens == len(other) - 1
    make_engine.close(harness)
    assert check([disk]).problems == []


def test_a_disk_that_cannot_be_read(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = saved_chat(make_engine, tmp_path)
    harness = make_engine(disk=tmp_path)
    new = random_ids(9, 4)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "preadv", broken)
        request = turn(harness, history, new)
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
    assert harness.done(request).stats.recomputed_tokens == len(history) - 1
    history += new + harness.ids(request)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)  # what was recomputed was saved again
    request = turn(harness, history, new)
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
    assert harness.done(request).stats.recomputed_tokens == 0
    make_engine.close(harness)
    assert check([tmp_path]).problems == []


def test_weights_swapped_under_the_same_name_while_the_server_was_down(tmp_path: Path) -> None:
    """State of the old weights is a miss, and is collected; the answer is the new model's."""
    model, disk = tmp_path / "model", tmp_path / "chunks"
    make_tiny_model(model, num_kv_heads=2, seed=0)
    make_engine = HarnessFactory(model)
    history = saved_chat(make_engine, disk)
    old_bytes = sum(path.stat().st_size for path in disk.glob("*.chunks"))
    make_tiny_model(model, num_kv_heads=2, seed=1)
    harness = make_engine(disk=disk)
    new = random_ids(9, 4)
    request = turn(harness, history, new)
    assert harness.ids(request) == Oracle(model).greedy(PREFIX + history + new, 12)
    assert harness.done(request).stats.restored_tokens == 0
    assert harness.done(request).stats.recomputed_tokens == len(history) - 1
    make_engine.close(harness)
    report = check([disk])
    assert report.problems == []
    assert report.bytes < 1.5 * old_bytes, "the old weights' state is still there"


def test_an_update_of_the_layout_while_the_server_was_down(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = saved_chat(make_engine, tmp_path)
    monkeypatch.setattr(sessions.chunks.layout, "VERSION", 99)
    monkeypatch.setattr(sessions.chunks.index, "SCHEMA_VERSION", 9901)
    monkeypatch.setattr("sessions.chunks.reconcile.SCHEMA_VERSION", 9901)
    for _ in range(2):
        harness = make_engine(disk=tmp_path)
        new = random_ids(9, 4)
        request = turn(harness, history, new)
        assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
        stats = harness.done(request).stats
        history += new + harness.ids(request)
        make_engine.close(harness)
        assert check([tmp_path]).problems == []
    assert stats.recomputed_tokens == 0, "the second start has what the first one saved"

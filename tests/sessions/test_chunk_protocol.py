"""The store is what the engine asks for; mypy checks the assignments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.restoration import chunk_store as wanted
from sessions.chunks import ChunkStore


def test_store_satisfies_the_engines_protocol(tmp_path: Path) -> None:
    make: Callable[[], wanted.ChunkStore] = lambda: ChunkStore([tmp_path], 1 << 20)  # noqa: E731
    store: wanted.ChunkStore = make()
    stream: wanted.ReadStream = store.read("c-1", [], budget_bytes=1 << 20)
    assert stream.finished
    assert stream.poll() == []
    assert store.find("c-1", b"f", []) == []
    assert store.bytes_used == 0
    store.close()

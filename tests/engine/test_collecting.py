"""What an operator has dropped: checkpoints of other weights, and of owners that are named."""

from __future__ import annotations

from pathlib import Path

from engine.messages import Collect, Forgotten
from sessions.chunks import ChunkStore, owner_sizes
from tests.engine.harness import HarnessFactory
from tests.engine.harness import random_ids as tokens
from tests.sessions.chunk_support import save, token_ids


def test_stale_and_named_checkpoints_go_and_others_stay(
    make_engine: HarnessFactory, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path)
    assert harness.store is not None
    first = harness.submit(tokens(70, 1), chat="a", prefix=tokens(64, 2), scope="s")
    harness.submit(tokens(70, 3), chat="b", prefix=tokens(64, 2), scope="s")
    harness.run()
    save(harness.store, "c-old", token_ids(1, 64), fingerprint=b"other weights")
    assert harness.store.flush(10)
    assert set(owner_sizes(tmp_path)) == {"c-a", "c-b", "c-old", "p-s"}
    harness.engine.handle(Collect(call_id=7, owners=["c-b", "c-none"]))
    assert harness.events[-1] == Forgotten(call_id=7)
    assert harness.store.flush(10)
    assert set(owner_sizes(tmp_path)) == {"c-a", "p-s"}
    history = tokens(70, 1) + harness.ids(first)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    again = harness.submit(
        tokens(5, 4), chat="a", prefix=tokens(64, 2), scope="s", history=history, computed=81
    )
    harness.run()
    assert harness.done(again).stats.restored_tokens == 81


def test_without_checkpoints_there_is_nothing_to_collect(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    harness.engine.handle(Collect(call_id=1, owners=["c-a"]))
    assert harness.events[-1] == Forgotten(call_id=1)


def test_a_closed_store_is_not_needed_for_sizes(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], cap_bytes=1 << 20)
    save(store, "c-a", token_ids(1, 64))
    store.close()
    assert set(owner_sizes(tmp_path)) == {"c-a"}

"""What a chat saves comes back, branches included, under the cap and after every restart."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from sessions.chunks import ChunkStore, StoreLockedError, check
from tests.sessions.chunk_support import (
    FINGERPRINT,
    LAYERS,
    STRIPE_BYTES,
    assert_clean,
    bytes_on_disk,
    chunk_files,
    end,
    memory_directory,
    restore,
    rows,
    save,
    stripes_of,
    token_ids,
    write_unindexed,
)

CAP = 1 << 24


def test_saved_chat_comes_back_in_the_same_process_and_after_a_restart(tmp_path: Path) -> None:
    ids = token_ids(1, 1000)
    store = ChunkStore([tmp_path], CAP)
    results: list[bool] = []
    save(store, "c-1", ids, done=results.append)
    assert store.flush(10.0)
    assert results == [True] * 16
    assert restore(store, "c-1", ids) == 1000
    assert store.stripes_written == 16
    end(store, [tmp_path])
    store = ChunkStore([tmp_path], CAP)
    assert store.bytes_used == bytes_on_disk([tmp_path])
    assert restore(store, "c-1", ids) == 1000
    report = end(store, [tmp_path])
    assert (report.owners, report.stripes) == (1, 16)
    assert report.owner_names == ["c-1"]


def test_a_stripe_takes_whole_4_kib_and_no_padding_between_layers(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    ids = token_ids(1, 64)
    save(store, "c-1", ids)
    end(store, [tmp_path])
    assert bytes_on_disk([tmp_path]) == STRIPE_BYTES
    (path,) = chunk_files([tmp_path])
    payload = b"".join(rows(ids, 0, i).tobytes() for i in range(len(LAYERS)))
    assert payload in path.read_bytes()


def test_other_fingerprint_owner_start_or_parent_is_a_miss(tmp_path: Path) -> None:
    ids = token_ids(1, 128)
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", ids)
    assert store.flush(10.0)
    assert restore(store, "c-1", ids, fingerprint=b"weights-2") == 0
    assert restore(store, "c-2", ids) == 0
    (start, parent, part) = stripes_of(ids)[1]
    assert store.find("c-1", FINGERPRINT, [(start, bytes(16), part)]) == [None]
    assert store.find("c-1", FINGERPRINT, [(0, parent, part)]) == [None]
    assert store.find("c-1", FINGERPRINT, [(start, parent, part)]) != [None]
    end(store, [tmp_path])


def test_branches_share_what_is_before_them_and_the_tokens_they_agree_in(tmp_path: Path) -> None:
    trunk = token_ids(1, 150)
    left = np.concatenate([trunk, token_ids(2, 100)])
    right = np.concatenate([trunk, token_ids(3, 70)])
    third = np.concatenate([trunk[:140], token_ids(4, 60)])
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", left)
    save(store, "c-1", right, since=128)
    assert store.flush(10.0)
    assert restore(store, "c-1", left) == 250
    assert restore(store, "c-1", right) == 220
    assert restore(store, "c-1", third) == 140
    report = end(store, [tmp_path])
    assert report.stripes == 4 + 2


def test_extended_stripe_supersedes_the_partial_one_but_not_its_sibling(tmp_path: Path) -> None:
    ids = token_ids(1, 64)
    sibling = np.concatenate([ids[:20], token_ids(2, 30)])
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", ids[:30])
    save(store, "c-1", sibling)
    save(store, "c-1", ids[:64])
    assert store.flush(10.0)
    assert restore(store, "c-1", ids) == 64
    assert restore(store, "c-1", sibling) == 50
    save(store, "c-1", ids[:40])  # already covered: nothing is written
    assert store.flush(10.0)
    assert store.stripes_written == 3
    assert end(store, [tmp_path]).stripes == 2


def test_a_stripe_superseded_between_find_and_read_is_still_read(tmp_path: Path) -> None:
    ids = token_ids(1, 64)
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", ids[:30])
    assert store.flush(10.0)
    (ref,) = store.find("c-1", FINGERPRINT, stripes_of(ids[:30]))
    assert ref is not None
    save(store, "c-1", ids)
    assert store.flush(10.0)
    stream = store.read("c-1", [ref], budget_bytes=1 << 20)
    (loaded,) = stream.poll(10.0)
    assert loaded.payload is not None
    stream.release(loaded)
    end(store, [tmp_path])


def test_forgotten_owner_is_gone_at_once_and_leaves_no_ids_anywhere(tmp_path: Path) -> None:
    ids = token_ids(1, 200)
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", ids)
    save(store, "c-2", ids[:64])
    assert store.flush(10.0)
    store.forget(["c-1", "c-unknown"])
    assert restore(store, "c-1", ids) == 0
    assert store.flush(10.0)
    secret = ids[64:128].tobytes()
    for path in tmp_path.iterdir():
        assert secret not in path.read_bytes(), path
    assert restore(store, "c-2", ids[:64]) == 64
    save(store, "c-1", ids)
    assert store.flush(10.0)
    assert restore(store, "c-1", ids) == 200
    end(store, [tmp_path])


def test_directories_are_used_in_turn_and_may_change_places(tmp_path: Path) -> None:
    dirs = [tmp_path / name for name in "abc"]
    store = ChunkStore(dirs, CAP)
    for n in range(6):
        save(store, f"c-{n}", token_ids(n, 64))
        assert store.flush(10.0)
    end(store, dirs)
    assert [len(chunk_files([directory])) for directory in dirs] == [2, 2, 2]
    turned = dirs[::-1]  # the index is in the last one now: made anew from the files
    store = ChunkStore(turned, CAP)
    assert [restore(store, f"c-{n}", token_ids(n, 64)) for n in range(6)] == [64] * 6
    end(store, turned)
    store = ChunkStore(dirs, CAP)
    assert [restore(store, f"c-{n}", token_ids(n, 64)) for n in range(6)] == [64] * 6
    end(store, dirs)


def test_owner_names_never_become_file_names(tmp_path: Path) -> None:
    root = tmp_path / "store"
    names = ["../../x", "/etc/passwd", "c-1/../../y", "a\0b", "ключ"]
    store = ChunkStore([root], CAP)
    for n, name in enumerate(names):
        save(store, name, token_ids(n, 64))
    assert store.flush(10.0)
    assert [restore(store, name, token_ids(n, 64)) for n, name in enumerate(names)] == [64] * 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    assert len(chunk_files([root])) == 5
    store.forget(names)
    assert end(store, [root]).owners == 0


def test_stripes_of_other_fingerprints_are_collected(tmp_path: Path) -> None:
    ids = token_ids(1, 128)
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-old", ids, fingerprint=b"weights-0")
    save(store, "c-both", ids, fingerprint=b"weights-0")
    save(store, "c-both", ids)
    assert store.flush(10.0)
    store.collect(FINGERPRINT)
    assert store.flush(10.0)
    assert restore(store, "c-both", ids) == 128
    assert restore(store, "c-both", ids, fingerprint=b"weights-0") == 0
    assert len(chunk_files([tmp_path])) == 1
    store.collect(FINGERPRINT)
    assert end(store, [tmp_path]).stripes == 2


def test_compaction_keeps_every_branch_and_gives_the_space_back(tmp_path: Path) -> None:
    trunk = token_ids(1, 64)
    branch = np.concatenate([trunk[:10], token_ids(2, 20)])
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", branch)
    for n in range(11, 65):
        save(store, "c-1", trunk[:n])
    assert store.flush(10.0)
    before = store.bytes_used
    (ref,) = store.find("c-1", FINGERPRINT, stripes_of(trunk))
    store.compact()
    assert store.flush(10.0)
    assert store.compactions == 1
    assert store.bytes_used < before / 10
    assert ref is not None
    stream = store.read("c-1", [ref], budget_bytes=1 << 20)  # found where it was, read where it is
    (loaded,) = stream.poll(10.0)
    assert loaded.payload is not None
    stream.release(loaded)
    assert restore(store, "c-1", trunk) == 64
    assert restore(store, "c-1", branch) == 30
    end(store, [tmp_path])
    store = ChunkStore([tmp_path], CAP)
    assert restore(store, "c-1", branch) == 30
    save(store, "c-1", np.concatenate([trunk, token_ids(5, 64)]), since=64)
    assert store.flush(10.0)
    assert restore(store, "c-1", np.concatenate([trunk, token_ids(5, 64)])) == 128
    end(store, [tmp_path])


def test_an_idle_writer_compacts_by_itself(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    ids = token_ids(1, 64)
    for n in range(1, 65):
        save(store, "c-1", ids[:n])
    assert store.flush(10.0)
    for _ in range(100):
        if store.compactions:
            break
        threading.Event().wait(0.1)
    assert store.compactions == 1
    end(store, [tmp_path])


def test_least_recently_used_owners_go_first_and_prefixes_last(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], 4 * STRIPE_BYTES)
    for owner in ("p-1", "c-1", "c-2", "c-3"):
        save(store, owner, token_ids(1, 64))
        assert store.flush(10.0)
    assert restore(store, "c-1", token_ids(1, 64)) == 64  # a use
    save(store, "c-4", token_ids(1, 64))
    assert store.flush(10.0)
    left = {o: restore(store, o, token_ids(1, 64)) for o in ("p-1", "c-1", "c-2", "c-3", "c-4")}
    assert left == {"p-1": 64, "c-1": 64, "c-2": 0, "c-3": 64, "c-4": 64}
    save(store, "c-5", token_ids(1, 256))
    assert store.flush(10.0)
    assert restore(store, "c-5", token_ids(1, 256)) == 256
    assert store.evictions == 1 + 4
    end(store, [tmp_path])


def test_a_chat_larger_than_the_cap_is_dropped_and_evicts_nobody(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], 2 * STRIPE_BYTES)
    results: list[bool] = []
    save(store, "c-1", token_ids(1, 192), done=results.append)
    assert store.flush(10.0)
    assert results == [True, True, False]
    assert store.stripes_dropped == 1
    end(store, [tmp_path])


def test_a_smaller_cap_is_obeyed_at_start(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    for n in range(8):
        save(store, f"c-{n}", token_ids(n, 64))
        assert store.flush(10.0)
    end(store, [tmp_path])
    store = ChunkStore([tmp_path], 3 * STRIPE_BYTES)
    assert store.flush(10.0)
    assert store.bytes_used == 3 * STRIPE_BYTES
    assert [restore(store, f"c-{n}", token_ids(n, 64)) for n in range(8)] == [0] * 5 + [64] * 3
    end(store, [tmp_path])


def test_opening_does_not_read_or_examine_what_idle_chats_have(tmp_path: Path) -> None:
    def work(owners: int, parent: Path) -> tuple[int, int, int]:
        root = parent / str(owners)
        root.mkdir()
        for n in range(owners):
            write_unindexed(root, f"c-{n:x}", token_ids(n, 3))
        store = ChunkStore([root], 1 << 30)
        assert store.start_report.files_examined == owners
        store.close()
        gate = threading.Event()  # holds the writer's own comparison back

        def wait(step: str) -> None:
            gate.wait()

        store = ChunkStore([root], 1 << 30, hook=wait)
        opened = store.start_report
        counted = (opened.files_examined, opened.stripes_scanned, store.index_rows_read)
        gate.set()
        assert restore(store, "c-7", token_ids(7, 3)) == 3
        store.close()
        assert assert_clean([root]).owners == owners
        return counted

    with memory_directory(tmp_path) as directory:
        assert work(10, directory) == work(10_000, directory)


def test_a_directory_has_one_store_at_a_time(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path / "a", tmp_path / "b"], CAP)
    with pytest.raises(StoreLockedError):
        ChunkStore([tmp_path / "b"], CAP)
    with pytest.raises(StoreLockedError):
        check([tmp_path / "a"])
    store.close()
    assert_clean([tmp_path / "a", tmp_path / "b"])


def test_what_no_stripe_can_be_is_refused(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    good = {
        "owner": "c-1",
        "fingerprint": FINGERPRINT,
        "start": 0,
        "parent_digest": bytes(16),
        "ids": token_ids(1, 1),
        "chunks": [(0, "kv", "bf16")],
        "payload": [np.zeros(8, np.uint8)],
        "done": lambda durable: None,
    }
    for name, value in (
        ("owner", ""),
        ("owner", "c" * 300),
        ("fingerprint", b""),
        ("start", -1),
        ("parent_digest", b"short"),
        ("ids", token_ids(1, 65)),
        ("ids", token_ids(1, 0)),
        ("chunks", []),
        ("chunks", [(0, "a name too long", "bf16")]),
        ("chunks", [(1 << 16, "kv", "bf16")]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            store.append(**{**good, name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least"):
        ChunkStore([tmp_path / "x"], -1)
    end(store, [tmp_path])


def test_empty_chunks_and_odd_lengths_are_kept(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    sizes = [0, 1, 4095, 0, 70001]
    payload = [np.full(size, i, np.uint8) for i, size in enumerate(sizes)]
    ids = token_ids(1, 5)
    results: list[bool] = []
    store.append(
        owner="c-1",
        fingerprint=FINGERPRINT,
        start=0,
        parent_digest=bytes(16),
        ids=ids,
        chunks=[(i, "kv", "q8") for i in range(5)],
        payload=payload,
        done=results.append,
    )
    assert store.flush(10.0)
    assert results == [True]
    (ref,) = store.find("c-1", FINGERPRINT, [(0, bytes(16), ids)])
    assert ref is not None
    assert [chunk.length for chunk in ref.chunks] == sizes
    stream = store.read("c-1", [ref], budget_bytes=1)
    (loaded,) = stream.poll(10.0)
    assert loaded.payload is not None
    assert loaded.payload.tobytes() == b"".join(part.tobytes() for part in payload)
    assert loaded.payload.ctypes.data % 64 == 0
    end(store, [tmp_path])


def test_nothing_is_saved_after_close(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    store.close()
    results: list[bool] = []
    save(store, "c-1", token_ids(1, 64), done=results.append)
    assert results == [False]
    assert not store.flush(1.0)
    assert_clean([tmp_path])


def test_index_is_a_file_of_its_own_with_a_clean_shutdown_mark(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", token_ids(1, 64))
    end(store, [tmp_path])
    db = sqlite3.connect(tmp_path / "index.sqlite3")
    meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
    db.close()
    assert meta["clean"] == 1
    assert meta["bytes"] == bytes_on_disk([tmp_path])
    assert not os.path.exists(tmp_path / "index.sqlite3-wal")

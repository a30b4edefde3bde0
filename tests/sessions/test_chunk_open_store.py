"""Looking at a store that is open elsewhere: sizes, soundness, and never a false alarm."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sessions.chunks import ChunkStore, check_open, owner_sizes
from tests.sessions.chunk_support import STRIPE_BYTES, save, token_ids


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.chunks"))


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    assert owner_sizes(tmp_path) == {}
    assert check_open([tmp_path])[0].owners == 0
    store = ChunkStore([tmp_path], cap_bytes=1 << 24)
    try:
        save(store, "c-a", token_ids(1, 128))
        save(store, "p-b", token_ids(2, 64))
        assert store.flush(10)
        assert owner_sizes(tmp_path) == {"c-a": 2 * STRIPE_BYTES, "p-b": STRIPE_BYTES}
        assert sum(owner_sizes(tmp_path).values()) == store.bytes_used
        report, bad = check_open([tmp_path], pauses_s=())
        assert (report.problems, bad) == ([], [])
        assert report.owner_names == ["c-a", "p-b"]
        assert (report.stripes, report.bytes) == (3, store.bytes_used)
    finally:
        store.close()


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_is_found_and_dropping_the_owner_puts_it_right(tmp_path: Path, damage: str) -> None:
    store = ChunkStore([tmp_path], cap_bytes=1 << 24)
    try:
        save(store, "c-a", token_ids(1, 128))
        assert store.flush(10)
        [hurt] = _files(tmp_path)
        save(store, "c-b", token_ids(2, 128))
        assert store.flush(10)
        if damage == "flipped":
            data = bytearray(hurt.read_bytes())
            data[STRIPE_BYTES - 4000] ^= 1
            hurt.write_bytes(data)
        elif damage == "cut":
            hurt.write_bytes(hurt.read_bytes()[:STRIPE_BYTES])
        else:
            hurt.unlink()
        report, bad = check_open([tmp_path], pauses_s=(0.0,))
        assert bad == ["c-a"]
        assert len(report.problems) == 1
        assert report.problems[0].startswith("c-a: ")
        store.forget(bad)
        assert store.flush(10)
        report, bad = check_open([tmp_path], pauses_s=())
        assert (report.problems, bad, report.owner_names) == ([], [], ["c-b"])
    finally:
        store.close()


def test_a_file_of_nobody_is_told(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], cap_bytes=1 << 24)
    try:
        (tmp_path / f"{'0' * 32}.chunks").write_bytes(b"x" * 4096)
        report, bad = check_open([tmp_path], pauses_s=(0.0,))
        assert bad == []
        assert report.problems == [
            f"{'0' * 32}.chunks belongs to no owner; the next start removes it"
        ]
    finally:
        store.close()


def test_a_store_that_is_written_to_raises_no_alarm(tmp_path: Path) -> None:
    """While chats grow, are forgotten and come back, a few checks one after the other."""
    store = ChunkStore([tmp_path], cap_bytes=1 << 26)
    over = threading.Event()

    def live() -> None:
        for number in range(2000):
            if over.is_set():
                return
            ids = token_ids(number % 7, 64 + 7 * (number % 40))
            save(store, f"c-{number % 7}", ids)
            if number % 11 == 0:
                store.forget([f"c-{number % 7}"])
            store.flush(10)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        for _ in range(4):
            report, bad = check_open([tmp_path], pauses_s=(0.0, 0.01, 0.05, 0.1, 0.2, 0.4))
            assert (report.problems, bad) == ([], [])
    finally:
        over.set()
        thread.join()
        store.close()

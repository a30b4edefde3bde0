"""Damage costs the damaged stripe: never a wrong byte, never an error, never a second try."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from sessions.chunks import ChunkStore, StoreLockedError, check
from tests.sessions.chunk_support import (
    FINGERPRINT,
    STRIPE_BYTES,
    Killed,
    assert_clean,
    bytes_on_disk,
    chunk_files,
    end,
    restore,
    save,
    stripes_of,
    token_ids,
)

CAP = 1 << 24
IDS = token_ids(1, 200)  # three full stripes and one of 8 tokens
FILE_BYTES = 3 * STRIPE_BYTES + 4096


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A closed store with chat c-1, and c-2 that nothing happens to."""
    root = tmp_path / "store"
    store = ChunkStore([root], CAP)
    save(store, "c-1", IDS)
    assert store.flush(10.0)
    save(store, "c-2", IDS)
    end(store, [root])
    return root


def file_of(root: Path, owner: str) -> Path:
    (path,) = [p for p in chunk_files([root]) if owner.encode() in p.read_bytes()[:4096]]
    return path


@pytest.mark.parametrize(
    "offset",
    [0, 9, 20, 60, 100, 430, 438, 640, 5000, 6000 + STRIPE_BYTES, 2 * STRIPE_BYTES + 10_600],
)
def test_flipped_byte_in_a_file_loses_that_stripe_only(saved: Path, offset: int) -> None:
    flip(file_of(saved, "c-1"), offset)
    store = ChunkStore([saved], CAP)
    assert restore(store, "c-1", IDS) == 200 - 64
    assert store.stripes_rejected == 1
    assert restore(store, "c-1", IDS) == 200 - 64
    assert store.stripes_rejected == 1, "tried again"
    assert restore(store, "c-2", IDS) == 200
    save(store, "c-1", IDS)  # recomputed, saved again
    assert store.flush(10.0)
    assert store.stripes_written == 1
    assert restore(store, "c-1", IDS) == 200
    end(store, [saved])


def test_check_finds_a_flipped_byte_and_repairs(saved: Path) -> None:
    flip(file_of(saved, "c-1"), STRIPE_BYTES + 5000)
    report = check([saved])
    assert report.problems == ["c-1: 1 of 4 stripes are damaged"]
    assert report.fixed == []
    assert not report.clean
    report = check([saved], repair=True)
    assert report.clean
    assert assert_clean([saved]).stripes == 7
    store = ChunkStore([saved], CAP)
    assert restore(store, "c-1", IDS) == 200 - 64
    end(store, [saved])


def test_flipped_bytes_in_the_index_never_give_wrong_bytes(saved: Path, tmp_path: Path) -> None:
    size = (saved / "index.sqlite3").stat().st_size
    came_back = 0
    for offset in range(0, size, 1531):
        root = tmp_path / "copy"
        shutil.copytree(saved, root)
        flip(root / "index.sqlite3", offset)
        store = ChunkStore([root], CAP)
        came_back += restore(store, "c-1", IDS) + restore(store, "c-2", IDS)
        save(store, "c-1", IDS)
        save(store, "c-3", IDS)
        assert store.flush(10.0)
        assert restore(store, "c-1", IDS) in (200, 136, 192, 72, 64, 128, 8, 0)
        assert store.bytes_used <= CAP
        store.close()
        check([root], repair=True)
        assert_clean([root])
        shutil.rmtree(root)
    assert came_back > 0.9 * 400 * (size // 1531)


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "short", "newer"])
def test_index_lost_or_damaged_is_made_anew_from_the_files(saved: Path, damage: str) -> None:
    index = saved / "index.sqlite3"
    if damage == "missing":
        index.unlink()
    elif damage == "empty":
        index.write_bytes(b"")
    elif damage == "garbage":
        index.write_bytes(os.urandom(8192))
    elif damage == "short":
        os.truncate(index, index.stat().st_size // 2)
    else:
        flip(index, 63)  # PRAGMA user_version
    assert not check([saved]).clean
    store = ChunkStore([saved], CAP)
    assert restore(store, "c-1", IDS) == 200
    assert restore(store, "c-2", IDS) == 200
    assert store.bytes_used == 2 * FILE_BYTES
    end(store, [saved])


def test_index_made_anew_leaves_superseded_and_damaged_stripes_out(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    for n in (10, 30, 64, 128, 150):
        save(store, "c-1", IDS[:n])
        assert store.flush(10.0)
    end(store, [tmp_path])
    path = file_of(tmp_path, "c-1")
    flip(path, path.read_bytes().index(IDS[64:128].tobytes()) + 1000)
    (tmp_path / "index.sqlite3").unlink()
    store = ChunkStore([tmp_path], CAP)
    assert restore(store, "c-1", IDS[:150]) == 64 + 22
    assert end(store, [tmp_path]).stripes == 2


@pytest.mark.parametrize("lost_index", [False, True])
def test_torn_tail_is_cut_at_every_length(tmp_path: Path, lost_index: bool) -> None:
    root = tmp_path / "store"
    store = ChunkStore([root], CAP)
    save(store, "c-1", IDS[:128])
    end(store, [root])
    before = tmp_path / "before"
    shutil.copytree(root, before)
    store = ChunkStore([root], CAP)
    save(store, "c-1", IDS)
    end(store, [root])
    whole = file_of(root, "c-1").read_bytes()
    for cut in [*range(2 * STRIPE_BYTES, FILE_BYTES, 1021), FILE_BYTES - 1, FILE_BYTES]:
        torn = tmp_path / "torn"
        shutil.copytree(before, torn)
        killed = ChunkStore([torn], CAP, hook=_kill_at_close)
        killed.flush(10.0)
        killed.close()  # so that the index says that it was not
        file_of(torn, "c-1").write_bytes(whole[:cut])
        if lost_index:
            (torn / "index.sqlite3").unlink()
        store = ChunkStore([torn], CAP)
        # whole stripes of the tail are kept; the last one's padding is not needed
        expected = 128 + (64 if cut >= 3 * STRIPE_BYTES else 0) + (8 if cut == len(whole) else 0)
        assert restore(store, "c-1", IDS) == expected, cut
        assert store.bytes_used == bytes_on_disk([torn])
        save(store, "c-1", IDS)
        assert store.flush(10.0)
        assert restore(store, "c-1", IDS) == 200
        end(store, [torn])
        shutil.rmtree(torn)


def _kill_at_close(step: str) -> None:
    if step == "close":
        raise Killed


def test_a_file_cut_behind_the_index_loses_what_was_cut(saved: Path) -> None:
    os.truncate(file_of(saved, "c-1"), STRIPE_BYTES + 100)
    store = ChunkStore([saved], CAP)
    assert store.flush(10.0)
    assert restore(store, "c-1", IDS) == 64
    save(store, "c-1", IDS)
    assert store.flush(10.0)
    assert restore(store, "c-1", IDS) == 200
    end(store, [saved])


@pytest.mark.parametrize("while_open", [False, True])
def test_a_vanished_file_is_one_miss_and_leaves_the_count(saved: Path, while_open: bool) -> None:
    if not while_open:
        file_of(saved, "c-1").unlink()
    store = ChunkStore([saved], CAP)
    assert store.flush(10.0)
    if while_open:
        file_of(saved, "c-1").unlink()
        refs = store.find("c-1", FINGERPRINT, stripes_of(IDS))
        stream = store.read("c-1", [ref for ref in refs if ref], budget_bytes=1 << 20)
        loaded = stream.poll(10.0)
        assert [stripe.payload for stripe in loaded] == [None] * 4
        assert stream.finished
    assert store.find("c-1", FINGERPRINT, stripes_of(IDS)) == [None] * 4
    assert store.flush(10.0)
    assert store.bytes_used == FILE_BYTES
    save(store, "c-1", IDS)
    assert store.flush(10.0)
    assert restore(store, "c-1", IDS) == 200
    end(store, [saved])


def test_appending_to_a_vanished_file_begins_a_new_one(saved: Path) -> None:
    store = ChunkStore([saved], CAP)
    assert store.flush(10.0)
    file_of(saved, "c-1").unlink()
    longer = token_ids(1, 264)
    save(store, "c-1", longer)
    assert store.flush(10.0)
    assert restore(store, "c-1", longer) > 0
    assert restore(store, "c-2", IDS) == 200
    end(store, [saved])


def test_foreign_files_are_neither_counted_nor_touched(saved: Path) -> None:
    foreign = [saved / "notes.txt", saved / "x.chunks", saved / ("A" * 32 + ".chunks")]
    for path in foreign:
        path.write_text("mine")
    (saved / ("0" * 32 + ".chunks")).write_bytes(b"an orphan of ours")
    store = ChunkStore([saved], CAP)
    assert store.flush(10.0)
    assert store.bytes_used == 2 * FILE_BYTES
    store.close()
    assert check([saved]).clean
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert not (saved / ("0" * 32 + ".chunks")).exists()


STEPS = ["reserve", "write", "create", "fsync", "fsync.dir", "commit"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_drops_stripes_and_the_store_goes_on(
    tmp_path: Path, step: str, code: int
) -> None:
    failing = False

    def hook(name: str) -> None:
        if failing and name == step:
            raise OSError(code, os.strerror(code))

    store = ChunkStore([tmp_path], CAP, hook=hook)
    results: list[bool] = []
    save(store, "c-1", IDS[:64], done=results.append)
    assert store.flush(10.0)
    failing = True
    save(store, "c-1", IDS, done=results.append)
    save(store, "c-2", IDS, done=results.append)
    assert store.flush(10.0)
    assert store.bytes_used == bytes_on_disk([tmp_path])
    failed = results.count(False)
    assert failed > 0
    assert store.stripes_dropped == failed
    assert restore(store, "c-1", IDS) >= 64
    failing = False
    save(store, "c-1", IDS, done=results.append)
    save(store, "c-2", IDS, done=results.append)
    assert store.flush(10.0)
    assert results.count(False) == failed
    assert restore(store, "c-1", IDS) == 200
    assert restore(store, "c-2", IDS) == 200
    end(store, [tmp_path])


def test_an_index_that_takes_no_eviction_costs_the_stripe_only(tmp_path: Path) -> None:
    failing = False

    def hook(name: str) -> None:
        if failing and name == "delete.commit":
            raise sqlite3.OperationalError("database or disk is full")

    store = ChunkStore([tmp_path], 4 * STRIPE_BYTES, hook=hook)
    save(store, "c-1", IDS)
    assert store.flush(10.0)
    failing = True
    results: list[bool] = []
    save(store, "c-2", IDS, done=results.append)
    assert store.flush(10.0)
    # The last stripe is small enough to fit without an eviction, if it came in a later group.
    assert results[:3] == [False] * 3
    assert len(results) == 4
    assert restore(store, "c-1", IDS) == 200
    failing = False
    save(store, "c-2", IDS, done=results.append)
    assert store.flush(10.0)
    assert results[4:] == [True] * 4
    end(store, [tmp_path])


@pytest.mark.parametrize("step", ["compact.copy", "compact.fsync", "compact.commit"])
def test_a_compaction_that_fails_changes_nothing(tmp_path: Path, step: str) -> None:
    def hook(name: str) -> None:
        if name == step:
            raise OSError(errno.ENOSPC, "no space")

    store = ChunkStore([tmp_path], CAP, hook=hook)
    for n in range(1, 65):
        save(store, "c-1", IDS[:n])
    store.compact()
    assert store.flush(10.0)
    assert store.compactions == 0
    assert restore(store, "c-1", IDS[:64]) == 64
    end(store, [tmp_path])


@pytest.mark.parametrize("removed", ["all", "the other"])
def test_a_removed_directory_is_told_counted_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, removed: str
) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    store = ChunkStore(dirs, CAP)
    for owner in ("c-1", "c-2"):
        save(store, owner, IDS)
        assert store.flush(10.0)
    for directory in dirs if removed == "all" else dirs[1:]:
        shutil.rmtree(directory)
    for owner in ("c-3", "c-4"):
        save(store, owner, IDS)
    assert store.flush(10.0)
    assert store.bytes_used == bytes_on_disk(dirs)
    assert store.stripes_dropped > 0
    told = [r.getMessage() for r in caplog.records if "a write was refused" in r.getMessage()]
    assert len(told) == 1
    assert "somebody removed a directory" in caplog.text
    for owner in ("c-1", "c-2", "c-3", "c-4"):
        # stripes of 64, 64, 64 and 8 tokens; of the first owners all or none, of others what was
        # written before and after the one that was refused
        restored = restore(store, owner, IDS)
        assert restored in (0, 200) if owner == "c-1" else restored % 64 in (0, 8)
        save(store, owner, IDS)
    assert store.flush(10.0)
    for owner in ("c-1", "c-2", "c-3", "c-4"):
        assert restore(store, owner, IDS) == 200
    assert store.write_trouble == ""
    with pytest.raises(StoreLockedError):
        ChunkStore(dirs, CAP)
    end(store, dirs)


def test_a_read_error_costs_its_stripes_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO at the second stripe: the rest of that read is lost, not tried again, saved anew."""
    store = ChunkStore([saved], CAP)
    good = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= STRIPE_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return good(fd, [buffers[0][:STRIPE_BYTES]], offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert restore(store, "c-1", IDS) == 64
    assert store.stripes_rejected == 3
    monkeypatch.setattr(os, "preadv", good)
    assert restore(store, "c-1", IDS) == 64
    assert restore(store, "c-2", IDS) == 200
    save(store, "c-1", IDS)
    assert store.flush(10.0)
    assert restore(store, "c-1", IDS) == 200
    end(store, [saved])


def test_a_reader_that_fails_lives_on_and_blames_no_stripe(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ChunkStore([saved], CAP, num_readers=1)

    def broken(*_: object) -> str:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("sessions.chunks.read_stream.stripe_error", broken)
        assert restore(store, "c-1", IDS) == 0
    assert "a reader failed" in caplog.text
    assert store.stripes_rejected == 0
    assert restore(store, "c-1", IDS) == 200
    end(store, [saved])

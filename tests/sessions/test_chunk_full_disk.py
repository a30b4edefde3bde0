"""A disk that fills up although the cap is not reached: checkpoints give way, and come back."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sessions.chunks import ChunkStore, check, disk_space, state
from sessions.chunks.disk_space import Space
from tests.sessions.chunk_support import (
    FINGERPRINT,
    STRIPE_BYTES,
    assert_clean,
    bytes_on_disk,
    end,
    restore,
    save,
    token_ids,
)

CAP = 1 << 30
TOTAL = 10_000 * STRIPE_BYTES
FULL = 3 * STRIPE_BYTES  # a chat of 192 tokens


class Disk:
    """A file system with so much room for chunk files and what others write."""

    def __init__(self, dirs: list[Path], room: int) -> None:
        self.dirs = dirs
        self.room = room

    def measure(self, directory: Path) -> Space:
        kept = Space(0, TOTAL).kept
        return Space(self.room + kept - bytes_on_disk(self.dirs), TOTAL)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk([tmp_path], 4 * FULL)
    monkeypatch.setattr(state, "measure", made.measure)
    return made


def put(store: ChunkStore, owner: int, name: str = "") -> list[bool]:
    done: list[bool] = []
    save(store, name or f"c-{owner}", token_ids(owner, 192), done=done.append)
    assert store.flush(10.0)
    return done


def back(store: ChunkStore, owner: int, name: str = "") -> int:
    return restore(store, name or f"c-{owner}", token_ids(owner, 192))


def test_what_is_left_free() -> None:
    assert Space(0, 1 << 40).kept == 64 << 20
    assert Space(0, 1 << 20).kept == (1 << 20) // 20
    assert Space(100, 1000).missing(60) == 10
    assert disk_space.measure(Path("/")).total > 0


def test_least_recently_used_chats_give_way_to_new_ones(tmp_path: Path, disk: Disk) -> None:
    store = ChunkStore([tmp_path], CAP)
    put(store, 9, "p-9")
    for owner in range(6):
        assert put(store, owner) == [True] * 3
        assert bytes_on_disk([tmp_path]) <= disk.room
    assert store.evictions == 3
    assert store.stripes_dropped == 0
    assert [back(store, owner) for owner in range(6)] == [0, 0, 0, 192, 192, 192]
    assert back(store, 9, "p-9") == 192, "prefixes go last"
    assert store.write_trouble == ""
    end(store, [tmp_path])


def test_when_others_fill_the_disk_it_is_told_counted_and_recovers(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = ChunkStore([tmp_path], CAP)
    put(store, 0)
    disk.room = -1  # even without our files
    assert put(store, 1) == [False] * 3
    assert put(store, 2) == [False] * 3
    assert store.stripes_dropped == 6
    assert store.write_refusals >= 2
    assert store.write_trouble == "No space left on device"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert "tried again" in told[0]
    disk.room = 4 * FULL
    assert put(store, 1) == [True] * 3
    assert store.write_trouble == ""
    assert "6 stripes were dropped" in caplog.records[-1].getMessage()
    assert back(store, 1) == 192
    assert store.stripes_dropped == 6
    end(store, [tmp_path])


def test_a_chat_that_is_read_is_not_deleted_for_another(tmp_path: Path, disk: Disk) -> None:
    disk.room = FULL
    store = ChunkStore([tmp_path], CAP)
    put(store, 0)
    with store._catalog.lock:
        store._catalog.reading["c-0"] += 1
    assert put(store, 1) == [False] * 3
    with store._catalog.lock:
        del store._catalog.reading["c-0"]
    assert put(store, 1) == [True] * 3
    assert [back(store, 0), back(store, 1)] == [0, 192]
    end(store, [tmp_path])


def test_only_chats_on_the_full_disk_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directories on two disks, of which one is full."""
    full, other = tmp_path / "full", tmp_path / "other"
    disk = Disk([full], 2 * FULL)

    def measure(directory: Path) -> Space:
        return disk.measure(directory) if directory == full else Space(TOTAL, TOTAL)

    monkeypatch.setattr(state, "measure", measure)
    monkeypatch.setattr(state, "same_device", lambda a, b: a == b)
    store = ChunkStore([full, other], CAP)
    for owner in range(8):
        assert put(store, owner) == [True] * 3
    assert [back(store, owner) for owner in range(8)] == [0, 192, 0, 192, 192, 192, 192, 192]
    end(store, [full, other])


def test_compaction_leaves_a_full_disk_alone(tmp_path: Path, disk: Disk) -> None:
    disk.room = 64 * STRIPE_BYTES
    store = ChunkStore([tmp_path], CAP)
    for count in range(1, 65):
        save(store, "c-1", token_ids(1, count))
    assert store.flush(10.0)
    disk.room = bytes_on_disk([tmp_path])
    store.compact()
    assert store.flush(10.0)
    assert store.compactions == 0
    assert restore(store, "c-1", token_ids(1, 64)) == 64
    end(store, [tmp_path])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MiB. Needs the right to mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if made.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def put_large(store: ChunkStore, owner: int) -> bool:
    """Append a stripe of 400 KB whose bytes are the owner's number."""
    done: list[bool] = []
    store.append(
        owner=f"c-{owner}",
        fingerprint=FINGERPRINT,
        start=0,
        parent_digest=bytes(16),
        ids=token_ids(owner, 64),
        chunks=[(0, "kv", "bf16")],
        payload=[np.full(400_000, owner, np.uint8)],
        done=done.append,
    )
    assert store.flush(10.0)
    return done == [True]


def large_back(store: ChunkStore, owner: int) -> bool:
    [ref] = store.find(f"c-{owner}", FINGERPRINT, [(0, bytes(16), token_ids(owner, 64))])
    if ref is None:
        return False
    [stripe] = store.read(f"c-{owner}", [ref], budget_bytes=1 << 20).poll(10.0)
    assert stripe.payload is not None
    assert np.all(stripe.payload == owner)
    return True


def fill(path: Path) -> None:
    """Take all that is left of the disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_a_real_disk_that_is_filled_from_both_sides(small_disk: Path) -> None:
    """The store fills it, then somebody else takes all that is left, then gives it back."""
    root = small_disk / "store"
    foreign = small_disk / "foreign"
    store = ChunkStore([root], CAP)
    for owner in range(60):
        assert put_large(store, owner)
    assert store.evictions > 20
    assert store.stripes_dropped == 0
    assert all(large_back(store, owner) for owner in range(40, 60))
    for owner in range(60, 63):
        fill(foreign.with_name(f"foreign{owner}"))
        put_large(store, owner)
    for path in small_disk.glob("foreign*"):
        path.unlink()
    put_large(store, 100)
    assert put_large(store, 101)
    assert large_back(store, 101)
    assert store.write_trouble == ""
    store.close()
    check([root], repair=True)
    assert_clean([root])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_ends_in_the_middle(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a stripe is on disk when the system says no: it is cut off again."""
    store = ChunkStore([tmp_path], CAP)
    put(store, 0)
    before = bytes_on_disk([tmp_path])
    whole = os.pwritev
    calls = 0

    def half(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            return whole(fd, [bytes(buffers[0][: len(buffers[0]) // 2])], offset)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", half)
    longer = token_ids(0, 300)
    done: list[bool] = []
    save(store, "c-0", longer, done=done.append)
    save(store, "c-1", longer, done=done.append)
    assert store.flush(10.0)
    assert calls > 2
    assert True not in done[3:5]
    assert bytes_on_disk([tmp_path]) == before == store.bytes_used
    assert store.write_trouble == os.strerror(code)
    monkeypatch.setattr(os, "pwritev", whole)
    save(store, "c-0", longer)
    save(store, "c-1", longer)
    assert store.flush(10.0)
    assert restore(store, "c-0", longer) == restore(store, "c-1", longer) == 300
    end(store, [tmp_path])


@pytest.mark.parametrize("piece", [4096, 1000])
def test_a_write_that_takes_several_calls(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the page cache an odd piece cannot be followed: the rest goes through it."""
    store = ChunkStore([tmp_path], CAP)
    whole = os.pwritev
    calls = 0

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return whole(fd, [buffers[0][:piece]], offset)

    monkeypatch.setattr(os, "pwritev", some)
    ids = token_ids(0, 300)
    save(store, "c-0", ids)
    assert store.flush(10.0)
    monkeypatch.setattr(os, "pwritev", whole)
    assert calls > 5
    assert restore(store, "c-0", ids) == 300
    end(store, [tmp_path])


@pytest.mark.parametrize("refuses", ["the flag", "the write"])
def test_a_file_system_without_direct_writes(
    tmp_path: Path, refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags, write = fcntl.fcntl, os.pwritev

    def no_flag(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return set_flags(fd, command, value)

    def no_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if set_flags(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return write(fd, buffers, offset)

    if refuses == "the flag":
        monkeypatch.setattr(fcntl, "fcntl", no_flag)
    else:
        monkeypatch.setattr(os, "pwritev", no_write)
    store = ChunkStore([tmp_path], CAP)
    ids = token_ids(0, 300)
    save(store, "c-0", ids)
    assert store.flush(10.0)
    assert store.write_trouble == ""
    assert restore(store, "c-0", ids) == 300
    end(store, [tmp_path])

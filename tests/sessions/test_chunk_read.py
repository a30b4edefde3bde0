"""Reads run ahead in order within their budget, beside writes, and can be given up."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from sessions.chunks import ChunkStore
from sessions.chunks.files import ChunkFiles
from tests.sessions.chunk_support import (
    FINGERPRINT,
    STRIPE_BYTES,
    chunk_files,
    end,
    restore,
    save,
    stripes_of,
    token_ids,
)

CAP = 1 << 26
IDS = token_ids(1, 64 * 40)


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", IDS)
    assert store.flush(10.0)
    return store


def test_budget_bounds_what_is_read_ahead_of_release(store: ChunkStore, tmp_path: Path) -> None:
    refs = [ref for ref in store.find("c-1", FINGERPRINT, stripes_of(IDS)) if ref]
    stream = store.read("c-1", refs, budget_bytes=4 * STRIPE_BYTES)
    held = []
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        held += stream.poll(0.05)
    assert len(held) == 4  # two requests of two stripes
    assert not stream.finished
    for stripe in held:
        stream.release(stripe)
    got = [stripe.ref for stripe in held]
    while not stream.finished:
        for stripe in stream.poll(10.0):
            got.append(stripe.ref)
            stream.release(stripe)
            stream.release(stripe)  # harmless
    assert got == refs
    assert stream.io_seconds > 0
    end(store, [tmp_path])


def test_a_stripe_larger_than_the_budget_is_read_alone(store: ChunkStore, tmp_path: Path) -> None:
    refs = [ref for ref in store.find("c-1", FINGERPRINT, stripes_of(IDS)) if ref]
    stream = store.read("c-1", refs[:3], budget_bytes=1)
    count = 0
    while not stream.finished:
        for stripe in stream.poll(10.0):
            assert stripe.payload is not None
            stream.release(stripe)
            count += 1
    assert count == 3
    end(store, [tmp_path])


def test_refs_may_skip_and_go_backwards(store: ChunkStore, tmp_path: Path) -> None:
    refs = [ref for ref in store.find("c-1", FINGERPRINT, stripes_of(IDS)) if ref]
    order = [7, 8, 9, 3, 20, 21, 0, 39]
    stream = store.read("c-1", [refs[i] for i in order], budget_bytes=1 << 20)
    starts = []
    while not stream.finished:
        for stripe in stream.poll(10.0):
            assert stripe.payload is not None
            starts.append(stripe.ref.start)
            stream.release(stripe)
    assert starts == [64 * i for i in order]
    end(store, [tmp_path])


def test_cancel_closes_the_file_and_gives_the_buffers_back(
    store: ChunkStore, tmp_path: Path
) -> None:
    refs = [ref for ref in store.find("c-1", FINGERPRINT, stripes_of(IDS)) if ref]
    assert restore(store, "c-1", IDS) == len(IDS)
    before = len(os.listdir("/proc/self/fd"))
    for wait in (0.0, 0.0, 0.01, 0.05):
        stream = store.read("c-1", refs, budget_bytes=2 * STRIPE_BYTES)
        held = stream.poll(wait)
        stream.cancel()
        stream.cancel()
        for stripe in held:
            stream.release(stripe)
        assert stream.poll(1.0) == []
    deadline = time.monotonic() + 10.0
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == before
    assert restore(store, "c-1", IDS) == len(IDS)
    end(store, [tmp_path])


def test_close_ends_open_streams(store: ChunkStore, tmp_path: Path) -> None:
    refs = [ref for ref in store.find("c-1", FINGERPRINT, stripes_of(IDS)) if ref]
    stream = store.read("c-1", refs, budget_bytes=2 * STRIPE_BYTES)
    store.close()
    assert stream.poll(1.0) == []


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(
    store: ChunkStore, tmp_path: Path
) -> None:
    (path,) = chunk_files([tmp_path])
    other = tmp_path / "other"
    files = ChunkFiles([other])
    os.link(path, other / path.name)
    file = files.open_read(path.name)
    buffer = memoryview(bytearray(8192))
    unaligned = 4096 - ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % 4096 + 1
    part = buffer[unaligned : unaligned + 4000]  # what direct I/O answers with EINVAL
    assert file.read_into(part, 0) == 4000
    assert part == path.read_bytes()[:4000]
    assert not file.direct
    os.close(file.fd)
    files.unlock()
    end(store, [tmp_path])


def test_a_shortage_of_memory_fails_the_read_and_blames_no_stripe(
    store: ChunkStore, tmp_path: Path
) -> None:
    refs = [ref for ref in store.find("c-1", FINGERPRINT, stripes_of(IDS)) if ref]
    # buffers come in whole MiB: room for everything else, none for one of them
    kept = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (512 << 10), kept[1]))
    try:
        stream = store.read("c-1", refs, budget_bytes=1 << 20)
        loaded = stream.poll(10.0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, kept)
    assert loaded[0].payload is None
    assert "memory" in loaded[0].error
    stream.cancel()
    assert store.stripes_rejected == 0
    assert restore(store, "c-1", IDS) == len(IDS)
    end(store, [tmp_path])


def test_foreign_refs_are_refused(store: ChunkStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not found by this store"):
        store.read("c-1", [object()], budget_bytes=1)  # type: ignore[list-item]
    end(store, [tmp_path])


def test_an_owner_being_read_is_not_evicted(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], 6 * STRIPE_BYTES)
    save(store, "c-1", IDS[:256])
    assert store.flush(10.0)
    refs = [ref for ref in store.find("c-1", FINGERPRINT, stripes_of(IDS[:256])) if ref]
    stream = store.read("c-1", refs, budget_bytes=1)
    results: list[bool] = []
    save(store, "c-2", IDS[:256], done=results.append)
    assert store.flush(10.0)
    assert results == [True, True, False, False]
    stream.cancel()
    assert restore(store, "c-1", IDS[:256]) == 256
    end(store, [tmp_path])


def test_reads_beside_writes_and_compaction(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", IDS[:640])
    assert store.flush(10.0)
    stop = threading.Event()
    failures: list[BaseException] = []

    def grow() -> None:
        try:
            n = 641
            while not stop.is_set() and n < len(IDS):
                save(store, "c-1", IDS[:n], since=n - 1)
                save(store, "c-2", IDS[: n % 64 + 1])
                n += 1
                if n % 50 == 0:
                    store.compact()
                    store.flush(10.0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(60):
            assert restore(store, "c-1", IDS[:640]) == 640
            restore(store, "c-2", IDS[:64])
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert store.stripes_rejected == 0
    end(store, [tmp_path])


def test_reads_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    store = ChunkStore([tmp_path], CAP)
    save(store, "c-1", IDS)
    assert store.flush(10.0)
    (path,) = chunk_files([tmp_path])
    assert restore(store, "c-1", IDS) == len(IDS)
    resident = _resident_pages(path)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident <= _resident_pages(path) + 0.1 * path.stat().st_size / 4096
    end(store, [tmp_path])


def _resident_pages(path: Path) -> int:
    """Pages of a file that are in the page cache, by mincore(2)."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        states = (ctypes.c_ubyte * (-(-size // 4096)))()
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(view.ctypes.data)
        assert libc.mincore(address, ctypes.c_size_t(size), states) == 0
        del view
    return sum(state & 1 for state in states)

"""How fast the chunk store reads back what it wrote, cold. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.config import EngineConfig
from engine.profile.cache import ProfileCache
from engine.profile.machine import disk_key
from engine.profile.record import DiskRead
from engine.restoration.chunk_store import ChunkStore, StripeRef

log = logging.getLogger(__name__)

STRIPE_BYTES = 1 << 20
NUM_STRIPES = 64
STRIPE_TOKENS = 64
PASSES = 3
BUDGET_S = 1.5  # of reading
FLUSH_S = 60.0
_OWNER = "measured"
_FINGERPRINT = b"profile"


class DiskNotMeasured(Exception):
    """The disk took or gave nothing back; the message says why."""


class Scratch(Protocol):
    """An empty chunk store of its own on the disk in question, deleted afterwards."""

    @property
    def store(self) -> ChunkStore: ...

    def make_cold(self) -> None:
        """Have the page cache drop what was written."""


def measure_disk(
    scratch: Callable[[], contextlib.AbstractContextManager[Scratch]],
) -> DiskRead:
    """Write 64 MiB of stripes, read them back up to three times; the median rate.

    Through the store's own readers, requests and checksums, so that the figure is what a restore
    gets. Raises DiskNotMeasured.
    """
    try:
        with scratch() as place:
            refs = _write(place.store)
            taken: list[tuple[float, float, int]] = []
            deadline = time.perf_counter() + BUDGET_S
            while len(taken) < PASSES and (not taken or time.perf_counter() < deadline):
                place.make_cold()
                taken.append(_read(place.store, refs))
    except OSError as error:
        raise DiskNotMeasured(str(error)) from error
    return DiskRead(
        bytes_per_s=NUM_STRIPES * STRIPE_BYTES / statistics.median(all_s for all_s, _, _ in taken),
        first_s=statistics.median(first_s for _, first_s, _ in taken),
        first_bytes=round(statistics.median(count for _, _, count in taken)),
    )


def disk_read(
    config: EngineConfig,
    directory: Path,
    scratch: Callable[[], contextlib.AbstractContextManager[Scratch]],
    *,
    again: bool = False,
) -> DiskRead:
    """The disk's kept figures, or measured now. Raises DiskNotMeasured."""

    def measure() -> DiskRead:
        log.info("measuring how fast checkpoints are read from %s", directory)
        return measure_disk(scratch)

    cache = ProfileCache(Path(config.profile_path) if config.profile_path else None)
    return cache.obtain(disk_key(directory), DiskRead, measure, again=again)


def _write(store: ChunkStore) -> list[StripeRef]:
    data = np.frombuffer(np.random.default_rng(0).bytes(STRIPE_BYTES), np.uint8)
    ids = np.zeros(STRIPE_TOKENS, np.int32)
    parent = bytes(16)
    starts = range(0, NUM_STRIPES * STRIPE_TOKENS, STRIPE_TOKENS)
    for start in starts:
        store.append(
            owner=_OWNER,
            fingerprint=_FINGERPRINT,
            start=start,
            parent_digest=parent,
            ids=ids,
            chunks=[(0, "kv", "bf16")],
            payload=[np.roll(data, start)],  # no two alike, lest the device fold them into one
            done=lambda durable: None,
        )
    if not store.flush(FLUSH_S):
        raise DiskNotMeasured(f"{NUM_STRIPES * STRIPE_BYTES >> 20} MiB took over {FLUSH_S:.0f} s")
    found = store.find(_OWNER, _FINGERPRINT, [(start, parent, ids) for start in starts])
    refs = [ref for ref in found if ref is not None]
    if len(refs) < NUM_STRIPES:
        raise DiskNotMeasured(f"{NUM_STRIPES * STRIPE_BYTES >> 20} MiB could not be written")
    return refs


def _read(store: ChunkStore, refs: list[StripeRef]) -> tuple[float, float, int]:
    """Seconds for all, seconds until the first came, and their bytes."""
    began = time.perf_counter()
    first_s, first_bytes = 0.0, 0
    stream = store.read(_OWNER, refs, budget_bytes=32 << 20)
    while not stream.finished:
        stripes = stream.poll(1.0)
        if stripes and not first_bytes:
            first_s = time.perf_counter() - began
            first_bytes = len(stripes) * STRIPE_BYTES
        for stripe in stripes:
            if stripe.payload is None:
                raise DiskNotMeasured(stripe.error)
            stream.release(stripe)
    return time.perf_counter() - began, first_s, first_bytes

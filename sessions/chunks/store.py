"""The chunk store: durable stripes of chats and shared prefixes, under a hard cap of bytes."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sessions.chunks.append import Append
from sessions.chunks.catalog import OwnerEntry, Stripe, StripeRef, best_match
from sessions.chunks.files import ChunkFiles, OpenFile
from sessions.chunks.layout import DIGEST_BYTES, MAX_TOKENS, build_layout
from sessions.chunks.read_pool import ReadPool
from sessions.chunks.read_stream import LoadedStripe, Located, ReadStream
from sessions.chunks.report import CheckReport
from sessions.chunks.rows import is_damage
from sessions.chunks.state import StoreState
from sessions.chunks.types import Bytes, ChunkStoreError, TokenIds
from sessions.chunks.types import StripeRef as AnyStripeRef
from sessions.chunks.writer import Barrier, Collect, Compact, Forget, Rebuild, Reject, Writer

log = logging.getLogger(__name__)

_MAX_NAME_BYTES = 200


class ChunkStore:
    """Durable stripes of chats and prefixes. One thread calls it; none of its calls but `flush`,
    `compact` and `close` waits for the disk longer than a look into the index takes.

    Chunks are a cache: whatever goes wrong costs stripes, never an error to the caller. The cap
    counts chunk files; the index takes less than a thousandth of them in common geometries.
    """

    def __init__(
        self,
        dirs: Sequence[Path],
        cap_bytes: int,
        *,
        num_readers: int = 2,
        hook: Callable[[str], None] | None = None,
    ) -> None:
        """Open the store in these directories, made if missing; new files go to each in turn.

        `hook` is called before each step of the writer, with its name. Raises StoreLockedError
        when another process has one of the directories, ChunkStoreError when the index can be
        neither read nor made, ValueError and OSError.
        """
        if cap_bytes < 0:
            raise ValueError(f"cap of {cap_bytes} bytes, at least 0")
        if num_readers < 1:
            raise ValueError(f"{num_readers} readers, at least 1")
        files = ChunkFiles(dirs)
        try:
            self._state = StoreState.open(files, cap_bytes, hook or (lambda step: None))
        except sqlite3.Error as error:
            files.unlock()
            raise ChunkStoreError(f"index {files.index_path}: {error}") from error
        except BaseException:
            files.unlock()
            raise
        self._catalog = self._state.catalog
        self._pool = ReadPool(num_readers)
        self._writer = Writer(self._state, files.unlock)

    # -- the engine's side

    def find(
        self, owner: str, fingerprint: bytes, wanted: Sequence[tuple[int, bytes, TokenIds]]
    ) -> list[AnyStripeRef | None]:
        """The best stripe for each wanted (start, parent_digest, ids); None where there is none."""
        refs: list[AnyStripeRef | None] = []
        with self._catalog.lock:
            entry = self._entry(owner)
            if entry is None:
                return [None] * len(wanted)
            self._catalog.touch(owner)
            for start, parent, ids in wanted:
                group = entry.stripes.get((start, parent))
                match = group and best_match(group, fingerprint, _id_bytes(ids))
                if match:
                    stripe, usable = match
                    refs.append(StripeRef(stripe, stripe.file, stripe.offset, usable))
                else:
                    refs.append(None)
        return refs

    def append(
        self,
        *,
        owner: str,
        fingerprint: bytes,
        start: int,
        parent_digest: bytes,
        ids: TokenIds,
        chunks: Sequence[tuple[int, str, str]],
        payload: Sequence[Bytes],
        done: Callable[[bool], None],
    ) -> None:
        """Hand one stripe to the writer thread; never waits for the disk.

        `chunks` are (layer, method, coding) in payload order, one contiguous buffer of `payload`
        each, read until `done` is called (from the writer thread, with True when durable). Raises
        ValueError for what no stripe can be.
        """
        if not 0 < len(ids) <= MAX_TOKENS:
            raise ValueError(f"{len(ids)} tokens in a stripe, 1 to {MAX_TOKENS}")
        if len(parent_digest) != DIGEST_BYTES:
            raise ValueError(f"parent digest of {len(parent_digest)} bytes, not {DIGEST_BYTES}")
        if not 0 <= start < 1 << 31:
            raise ValueError(f"start {start}, 0 to {(1 << 31) - 1}")
        for what, size in (("owner", len(owner.encode())), ("fingerprint", len(fingerprint))):
            if not 0 < size <= _MAX_NAME_BYTES:
                raise ValueError(f"{what} of {size} bytes, 1 to {_MAX_NAME_BYTES}")
        layout = build_layout(tuple(chunks), tuple(buffer.nbytes for buffer in payload))
        views = [buffer.data.cast("B") if buffer.nbytes else memoryview(b"") for buffer in payload]
        append = Append(
            owner, fingerprint, start, parent_digest, _id_bytes(ids), layout, views, done
        )
        if not self._writer.put(append):
            append.finish(self._state.counters)

    def read(self, owner: str, refs: Sequence[AnyStripeRef], *, budget_bytes: int) -> ReadStream:
        """Start reading these stripes, all of one owner."""
        ours = []
        for ref in refs:
            if not isinstance(ref, StripeRef):
                raise ValueError(f"{ref!r} was not found by this store")
            ours.append(ref)
        outcomes: list[Located | LoadedStripe] = []
        file: OpenFile | None = None
        with self._catalog.lock:
            entry = self._entry(owner)
            try:
                if entry is not None and ours:
                    file = self._state.files.open_read(entry.file)
            except FileNotFoundError:
                assert entry is not None
                self._catalog.drop(owner)
                self._catalog.doomed[owner] += 1
                self._state.counters.stripes_rejected += len(ours)
                if not self._writer.put(Forget([owner], entry.file)):
                    self._catalog.doomed[owner] -= 1
            except OSError as error:
                log.warning("chunk store: %s", error)
            for ref in ours:
                if file is None or entry is None:
                    outcomes.append(
                        LoadedStripe(ref, None, "its file is missing or cannot be opened")
                    )
                elif ref.file == entry.file:
                    # also a stripe superseded since: its bytes are still there
                    outcomes.append(Located.of(owner, ref, ref.stripe, ref.offset))
                elif moved := entry.same(ref.stripe):
                    outcomes.append(Located.of(owner, ref, moved, moved.offset))
                else:
                    outcomes.append(LoadedStripe(ref, None, "it is gone since it was found"))
            if file is not None:
                self._catalog.reading[owner] += 1

        def end() -> None:
            if file is not None:
                with self._catalog.lock:
                    self._catalog.reading[owner] -= 1
                    if not self._catalog.reading[owner]:
                        del self._catalog.reading[owner]

        def bad(stripe: Stripe) -> None:
            self._state.reject(owner, stripe)
            self._writer.put(Reject(owner, stripe.id))

        return ReadStream(self._pool, file, outcomes, budget_bytes, bad, end)

    def _entry(self, owner: str) -> OwnerEntry | None:
        """What is held of the owner; None also when the index cannot tell. Lock held."""
        if self._catalog.doomed[owner] or self._catalog.damaged:
            return None
        try:
            return self._catalog.entry(owner)
        except sqlite3.Error as error:
            log.warning("chunk store: %s", error)
            if is_damage(error):
                self._catalog.damaged = True
                self._writer.put(Rebuild())
            return None

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything asked so far is durable, done or failed; False on timeout."""
        barrier = Barrier()
        if not self._writer.put(barrier):
            return False
        return barrier.event.wait(timeout_s) and barrier.reached

    def forget(self, owners: Sequence[str]) -> None:
        """Delete what is held of these owners: index first, then files. At once out of `find`."""
        with self._catalog.lock:
            for owner in owners:
                self._catalog.doomed[owner] += 1
                self._catalog.drop(owner)
        self._writer.put(Forget(list(owners)))

    def collect(self, fingerprint: bytes) -> None:
        """Delete the stripes of every other fingerprint; costs nothing when there are none."""
        self._writer.put(Collect(fingerprint))

    def compact(self) -> None:
        """Rewrite now, not when idle, the files that are more than half superseded stripes."""
        self._writer.put(Compact())

    @property
    def bytes_used(self) -> int:
        """Bytes of all chunk files."""
        return self._state.used

    @property
    def bytes_cap(self) -> int:
        return self._state.cap

    @property
    def stripes_written(self) -> int:
        """Stripes made durable since the store was opened; so the other counts."""
        return self._state.counters.stripes_written

    @property
    def stripes_dropped(self) -> int:
        """Stripes not saved: over the cap, the disk is full, or a write failed."""
        return self._state.counters.stripes_dropped

    @property
    def stripes_rejected(self) -> int:
        """Stripes found missing, torn or corrupt when read."""
        return self._state.counters.stripes_rejected

    @property
    def evictions(self) -> int:
        """Owners that lost their stripes to the cap or to a full disk."""
        return self._state.counters.evictions

    @property
    def write_refusals(self) -> int:
        """Writes that the system did not take (a full disk, a removed directory)."""
        return self._state.counters.refusals

    @property
    def write_trouble(self) -> str:
        """Why the last write was refused; empty as soon as one is taken again."""
        return self._state.trouble

    @property
    def compactions(self) -> int:
        """Files rewritten without their superseded stripes."""
        return self._state.counters.compactions

    @property
    def start_report(self) -> CheckReport:
        """What opening found and put right."""
        return self._state.start_report

    @property
    def index_rows_read(self) -> int:
        """Rows of owners and stripes read from the index so far; opening reads none."""
        return self._state.rows_read

    def close(self) -> None:
        """Cancel reads, finish pending writes and end the threads."""
        self._pool.close()
        self._writer.close()


def _id_bytes(ids: TokenIds) -> bytes:
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()

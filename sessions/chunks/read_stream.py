"""Reading an owner's stripes ahead of the caller, within a byte budget."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sessions.chunks.catalog import Stripe, StripeRef
from sessions.chunks.files import OpenFile
from sessions.chunks.layout import ALIGN, header_bytes, stripe_error
from sessions.chunks.read_pool import Buffer, ReadPool
from sessions.chunks.types import Bytes
from sessions.chunks.types import LoadedStripe as AnyLoadedStripe

log = logging.getLogger(__name__)

REQUEST_BYTES = 4 << 20  # adjacent stripes are read together up to this


@dataclass(slots=True, eq=False)
class LoadedStripe:
    """Outcome of one read; `payload` is None when the stripe was missing, torn or corrupt."""

    ref: StripeRef
    payload: Bytes | None
    error: str
    buffer: Buffer | None = None
    began: float = 0.0  # of the read that brought it in, seconds of time.perf_counter
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Located:
    """A stripe to read: where it is now, and what its header must begin with."""

    ref: StripeRef
    stripe: Stripe
    offset: int
    head: bytes
    payload_at: int

    @classmethod
    def of(cls, owner: str, ref: StripeRef, stripe: Stripe, offset: int) -> Located:
        name = owner.encode()
        at = header_bytes(name, stripe.fingerprint, stripe.ids, stripe.layout)
        return cls(ref, stripe, offset, stripe.head(owner), at)


@dataclass(frozen=True, slots=True)
class _Request:
    """Adjacent stripes that one read brings in, and their places in the stream."""

    offset: int
    num_bytes: int
    items: tuple[tuple[int, Located], ...]


class ReadStream:
    """Reads running ahead on reader threads, in the order of the refs, within a byte budget.

    A read larger than the budget goes alone. The caller's thread polls, releases and cancels.
    """

    def __init__(
        self,
        pool: ReadPool,
        file: OpenFile | None,
        outcomes: Sequence[Located | LoadedStripe],
        budget_bytes: int,
        on_bad: Callable[[Stripe], None],
        on_end: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._file = file
        self._budget = budget_bytes
        self._on_bad = on_bad
        self._on_end = on_end
        self._results: list[LoadedStripe | None] = [
            one if isinstance(one, LoadedStripe) else None for one in outcomes
        ]
        located = [(i, one) for i, one in enumerate(outcomes) if isinstance(one, Located)]
        self._requests = _coalesce(located, min(REQUEST_BYTES, max(ALIGN, budget_bytes // 2)))
        self._num_begun = 0
        self._num_running = 0
        self._outstanding = 0  # bytes of buffers being read into or not released
        self._delivered = 0
        self._cancelled = False
        self._ended = False
        self._io_seconds = 0.0
        if self._requests:
            pool.add(self)
        else:
            with pool.lock:
                self._end_if_done()

    # -- the caller's side

    def poll(self, timeout_s: float = 0.0) -> list[AnyLoadedStripe]:
        """Stripes that came in, in order; waits at most `timeout_s` for the first."""
        with self._pool.lock:
            if timeout_s > 0 and not self._available() and not self._over():
                self._pool.ready.wait_for(lambda: self._available() or self._over(), timeout_s)
            out: list[AnyLoadedStripe] = []
            while self._available():
                result = self._results[self._delivered]
                assert result is not None
                self._results[self._delivered] = None
                self._delivered += 1
                out.append(result)
            return out

    def release(self, stripe: AnyLoadedStripe) -> None:
        """The payload is not needed any more; its buffer may take another read."""
        if not isinstance(stripe, LoadedStripe):
            raise ValueError(f"{stripe!r} was not read by this store")
        with self._pool.lock:
            buffer, stripe.buffer = stripe.buffer, None
            if buffer is not None:
                self._leave(buffer)

    @property
    def finished(self) -> bool:
        """Every ref was delivered by `poll`."""
        return self._delivered == len(self._results)

    @property
    def io_seconds(self) -> float:
        """Time spent in reads and checksums so far, summed over the readers' busy time."""
        return self._io_seconds

    def cancel(self) -> None:
        """Stop reading; buffers return when reads in flight end. Harmless when finished."""
        with self._pool.lock:
            self._cancelled = True
            for i, result in enumerate(self._results):
                if result is not None and result.buffer is not None:
                    self._leave(result.buffer)
                    result.buffer = None
                self._results[i] = None
            self._end_if_done()
            self._pool.ready.notify_all()

    def _available(self) -> bool:
        return not self.finished and self._results[self._delivered] is not None

    def _over(self) -> bool:
        return self.finished or self._cancelled

    # -- the readers' side

    def next_job(self) -> Callable[[], None] | None:
        """The next read if the budget allows it, as begun. Lock held."""
        if self._cancelled or self._num_begun == len(self._requests):
            return None
        request = self._requests[self._num_begun]
        if self._outstanding and self._outstanding + request.num_bytes > self._budget:
            return None
        self._num_begun += 1
        self._num_running += 1
        self._outstanding += request.num_bytes
        return partial(self._carry_out, request)

    def _carry_out(self, request: _Request) -> None:
        """Read, verify, and hand over; whatever happens, nobody waits for ever. Reader thread."""
        try:
            self._bring(request)
        except Exception as error:  # the thread's boundary: it must live, for the other streams
            log.exception("chunk store: a reader failed")
            self._give_up(request, f"its reader failed: {error}")

    def _bring(self, request: _Request) -> None:
        try:
            buffer = self._pool.take_buffer(request.num_bytes)
        except (OSError, MemoryError) as shortage:
            self._give_up(request, f"no memory to read into: {shortage}")
            return
        buffer.users = len(request.items)
        buffer.charged = request.num_bytes
        began = time.perf_counter()
        num_read, failure = self._read(request, buffer)
        loaded = []
        bad = []
        at = 0
        for place, one in request.items:
            stripe = one.stripe
            view = buffer.view[at : at + stripe.total]
            error = failure
            if at + stripe.total <= num_read:
                error = stripe_error(view, one.head, stripe.layout)
            elif not error:
                error = "the file ends before it"
            if error:
                bad.append(stripe)
                loaded.append((place, LoadedStripe(one.ref, None, error, buffer)))
            else:
                payload = np.frombuffer(view, np.uint8, stripe.layout.payload_bytes, one.payload_at)
                loaded.append((place, LoadedStripe(one.ref, payload, "", buffer)))
            at += stripe.total
        for stripe in bad:
            self._on_bad(stripe)
        ended = time.perf_counter()
        for _, result in loaded:
            result.began, result.ended = began, ended
        with self._pool.lock:
            self._io_seconds += ended - began
            self._num_running -= 1
            for place, result in loaded:
                if result.payload is None or self._cancelled:
                    result.buffer = None
                    self._leave(buffer)
                if not self._cancelled:
                    self._results[place] = result
            self._end_if_done()
            self._pool.ready.notify_all()

    def _give_up(self, request: _Request, error: str) -> None:
        """Deliver stripes as not read; they are not to blame and stay in the store."""
        with self._pool.lock:
            self._num_running -= 1
            self._outstanding -= request.num_bytes
            for place, one in request.items:
                if not self._cancelled:
                    self._results[place] = LoadedStripe(one.ref, None, error)
            self._end_if_done()
            self._pool.ready.notify_all()

    def _read(self, request: _Request, buffer: Buffer) -> tuple[int, str]:
        """Bytes read, and why they are fewer than asked for, if the system said so."""
        assert self._file is not None
        done = 0
        try:
            while done < request.num_bytes:
                part = buffer.view[done : request.num_bytes]
                num = self._file.read_into(part, request.offset + done)
                if not num:
                    break
                done += num
            self._file.leave_no_trace(request.offset, request.num_bytes)
        except OSError as error:
            return done, f"cannot be read: {error}"
        return done, ""

    def _leave(self, buffer: Buffer) -> None:
        """One stripe less needs the buffer. Lock held."""
        buffer.users -= 1
        if not buffer.users:
            self._outstanding -= buffer.charged
            self._pool.give_buffer(buffer)
            self._pool.work.notify()

    def _end_if_done(self) -> None:
        """Close the file once no read can follow. Lock held."""
        more = self._num_begun < len(self._requests) and not self._cancelled
        if self._ended or more or self._num_running:
            return
        self._ended = True
        self._pool.remove(self)
        if self._file is not None:
            os.close(self._file.fd)
        self._on_end()


def _coalesce(located: Sequence[tuple[int, Located]], limit: int) -> list[_Request]:
    """Requests of neighbours in the file, of at most `limit` bytes unless one stripe is larger."""
    requests: list[_Request] = []
    run: list[tuple[int, Located]] = []
    size = 0
    for place, one in located:
        follows = bool(run) and run[-1][1].offset + run[-1][1].stripe.total == one.offset
        if run and not (follows and size + one.stripe.total <= limit):
            requests.append(_Request(run[0][1].offset, size, tuple(run)))
            run, size = [], 0
        run.append((place, one))
        size += one.stripe.total
    if run:
        requests.append(_Request(run[0][1].offset, size, tuple(run)))
    return requests

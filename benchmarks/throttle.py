"""A chunk store whose disk is as slow as asked: reads pass a token bucket on their way back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.restoration.chunk_store import (
    Bytes,
    ChunkStore,
    LoadedStripe,
    ReadStream,
    StripeRef,
    TokenIds,
)


class ThrottledStream:
    """Delivers what another stream reads no faster than `bytes_per_s`. The caller's thread only.

    The bucket starts empty and holds at most the read-ahead budget: a device that is waited for
    is never further ahead than the reader's buffers allow.
    """

    def __init__(self, inner: ReadStream, bytes_per_s: float, budget_bytes: int) -> None:
        self._inner = inner
        self._rate = bytes_per_s
        self._limit = float(budget_bytes)
        self._tokens = 0.0
        self._filled_at = time.perf_counter()
        self._held: deque[LoadedStripe] = deque()
        self._delivered_bytes = 0

    def poll(self, timeout_s: float = 0.0) -> list[LoadedStripe]:
        """Stripes that the slow device would have read by now, in order."""
        deadline = time.perf_counter() + timeout_s
        while True:
            self._held.extend(self._inner.poll(0.0))
            out = self._take()
            left = deadline - time.perf_counter()
            if out or left <= 0 or self.finished:
                return out
            if self._held:
                short = self._held[0].ref.payload_bytes - self._tokens
                time.sleep(min(left, max(0.0, short) / self._rate))
            else:
                self._held.extend(self._inner.poll(left))

    def release(self, stripe: LoadedStripe) -> None:
        self._inner.release(stripe)

    @property
    def finished(self) -> bool:
        return self._inner.finished and not self._held

    @property
    def io_seconds(self) -> float:
        """Time in which the slow device would have been busy, or the real one was."""
        return max(self._inner.io_seconds, self._delivered_bytes / self._rate)

    def cancel(self) -> None:
        while self._held:
            self._inner.release(self._held.popleft())
        self._inner.cancel()

    def _take(self) -> list[LoadedStripe]:
        now = time.perf_counter()
        self._tokens += (now - self._filled_at) * self._rate
        self._filled_at = now
        out: list[LoadedStripe] = []
        while self._held and self._held[0].ref.payload_bytes <= self._tokens:
            stripe = self._held.popleft()
            self._tokens -= stripe.ref.payload_bytes
            self._delivered_bytes += stripe.ref.payload_bytes
            out.append(stripe)
        largest = self._held[0].ref.payload_bytes if self._held else 0
        self._tokens = min(self._tokens, max(self._limit, float(largest)))
        return out


class ThrottledStore:
    """A chunk store with a limit on the rate of each read stream; `bytes_per_s` None: no limit."""

    def __init__(self, inner: ChunkStore) -> None:
        self.bytes_per_s: float | None = None
        self._inner = inner

    def find(
        self, owner: str, fingerprint: bytes, wanted: Sequence[tuple[int, bytes, TokenIds]]
    ) -> list[StripeRef | None]:
        return self._inner.find(owner, fingerprint, wanted)

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
        self._inner.append(
            owner=owner,
            fingerprint=fingerprint,
            start=start,
            parent_digest=parent_digest,
            ids=ids,
            chunks=chunks,
            payload=payload,
            done=done,
        )

    def read(self, owner: str, refs: Sequence[StripeRef], *, budget_bytes: int) -> ReadStream:
        stream = self._inner.read(owner, refs, budget_bytes=budget_bytes)
        if self.bytes_per_s is None:
            return stream
        return ThrottledStream(stream, self.bytes_per_s, budget_bytes)

    def flush(self, timeout_s: float) -> bool:
        return self._inner.flush(timeout_s)

    def collect(self, fingerprint: bytes) -> None:
        self._inner.collect(fingerprint)

    def forget(self, owners: Sequence[str]) -> None:
        self._inner.forget(owners)

    @property
    def stripes_written(self) -> int:
        return self._inner.stripes_written

    @property
    def stripes_dropped(self) -> int:
        return self._inner.stripes_dropped

    @property
    def write_refusals(self) -> int:
        return self._inner.write_refusals

    @property
    def write_trouble(self) -> str:
        return self._inner.write_trouble

    @property
    def bytes_used(self) -> int:
        return self._inner.bytes_used

    @property
    def bytes_cap(self) -> int:
        return self._inner.bytes_cap

    def close(self) -> None:
        self._inner.close()

"""What the engine needs of a chunk store: buffers in, buffers out.

A *stripe* covers up to 64 consecutive tokens of one owner (a chat, or a shared prefix) and holds,
for each layer that the plan saves, one chunk. Positions are relative to the owner's first token.
`parent_digest` is the 16-byte BLAKE2b digest of all token ids (int32, little endian) before the
stripe's start, those of the owner's ancestors included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class LayerChunk(Protocol):
    """Where a layer's chunk lies in a stripe's payload."""

    @property
    def layer(self) -> int: ...
    @property
    def method(self) -> str: ...  # "hidden" or "kv"
    @property
    def coding(self) -> str: ...  # element type: "bf16", "fp32"
    @property
    def offset(self) -> int: ...  # bytes from the payload's start
    @property
    def length(self) -> int: ...  # bytes


class StripeRef(Protocol):
    """A stripe that is on disk and agrees with the ids asked for in its first `usable` tokens."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...  # rows in each chunk
    @property
    def usable(self) -> int: ...  # leading rows whose token ids agree
    @property
    def chunks(self) -> Sequence[LayerChunk]: ...
    @property
    def payload_bytes(self) -> int: ...


class LoadedStripe(Protocol):
    """Outcome of one read. `payload` is None when it was missing, torn or corrupt.

    `began` and `ended`: of the read that brought it in, seconds of `time.perf_counter`; both 0
    when there was none.
    """

    @property
    def ref(self) -> StripeRef: ...
    @property
    def payload(self) -> Bytes | None: ...
    @property
    def error(self) -> str: ...
    @property
    def began(self) -> float: ...
    @property
    def ended(self) -> float: ...


class ReadStream(Protocol):
    """Reads running ahead on reader threads, in the order of the refs, within a byte budget."""

    def poll(self, timeout_s: float = 0.0) -> list[LoadedStripe]:
        """Stripes that came in, in order; waits at most `timeout_s` for the first."""

    def release(self, stripe: LoadedStripe) -> None:
        """The payload is not needed any more; its buffer may take another read."""

    @property
    def finished(self) -> bool:
        """Every ref was delivered by `poll`."""

    @property
    def io_seconds(self) -> float:
        """Time spent in reads and checksums so far, summed over the readers' busy time."""

    def cancel(self) -> None:
        """Stop reading; buffers return when reads in flight end."""


class ChunkStore(Protocol):
    """Durable stripes of chats and prefixes. Called from the engine's main thread."""

    def find(
        self, owner: str, fingerprint: bytes, wanted: Sequence[tuple[int, bytes, TokenIds]]
    ) -> list[StripeRef | None]:
        """The best stripe for each wanted (start, parent_digest, ids); None where there is none."""

    def append(
        self,
        *,
        owner: str,
        fingerprint: bytes,
        start: int,
        parent_digest: bytes,
        ids: TokenIds,
        chunks: Sequence[tuple[int, str, str]],  # layer, method, coding; in payload order
        payload: Sequence[Bytes],  # one buffer a chunk, read until `done` is called
        done: Callable[[bool], None],  # from the writer thread: True when durable
    ) -> None:
        """Hand one stripe to the writer thread; never waits for the disk."""

    def read(self, owner: str, refs: Sequence[StripeRef], *, budget_bytes: int) -> ReadStream:
        """Start reading these stripes, all of one owner."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended so far is durable or failed; False on timeout."""

    def collect(self, fingerprint: bytes) -> None:
        """Let go of every stripe of another fingerprint, by the writer thread."""

    def forget(self, owners: Sequence[str]) -> None:
        """Delete what is held of these owners: index first, then files."""

    @property
    def stripes_written(self) -> int: ...
    @property
    def stripes_dropped(self) -> int: ...  # failed to be written, for want of space or by error
    @property
    def write_refusals(self) -> int: ...  # writes that the system did not take
    @property
    def write_trouble(self) -> str: ...  # why the last one was not; empty once one is taken
    @property
    def bytes_used(self) -> int: ...
    @property
    def bytes_cap(self) -> int: ...

    def close(self) -> None:
        """Finish pending writes and end the threads."""

"""What crosses the store's edge, as structural types: the caller's own protocols match these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class ChunkStoreError(Exception):
    """The store cannot be opened as it was asked to be."""


class StoreLockedError(ChunkStoreError):
    """Another process holds one of the store's directories."""


class LayerChunk(Protocol):
    """Where a layer's chunk lies in a stripe's payload; bytes."""

    @property
    def layer(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def coding(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class StripeRef(Protocol):
    """A durable stripe that agrees with the ids asked for in its first `usable` tokens."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def usable(self) -> int: ...
    @property
    def chunks(self) -> Sequence[LayerChunk]: ...
    @property
    def payload_bytes(self) -> int: ...


class LoadedStripe(Protocol):
    """Outcome of one read; `payload` is None when the stripe was missing, torn or corrupt.

    `began` and `ended`: of that read, seconds of `time.perf_counter`; both 0 when there was none.
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

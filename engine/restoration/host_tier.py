"""Chats that lately left the KV cache, in host memory: they come back without the disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from engine.memory.page_pool import PAGE_SIZE
from engine.memory.sequence import Sequence as TokenSequence
from engine.restoration.chunk_store import (
    Bytes,
    ChunkStore,
    LoadedStripe,
    ReadStream,
    StripeRef,
    TokenIds,
)


@dataclass(frozen=True)
class HostChunk:
    """A layer's K/V within a copy; bytes."""

    layer: int
    offset: int
    length: int
    method: str = "kv"
    coding: str = ""  # the model's own elements


@dataclass(frozen=True, eq=False)
class HostStripe:
    """A copy of the K/V of up to 64 tokens, all layers; `ids` are theirs."""

    ids: TokenIds
    payload: Bytes
    chunks: tuple[HostChunk, ...]


@dataclass(frozen=True, eq=False)
class HostRef:
    """A stripe in memory, as the store's own are told of."""

    start: int
    usable: int
    stripe: HostStripe

    @property
    def num_tokens(self) -> int:
        return len(self.stripe.ids)

    @property
    def chunks(self) -> Sequence[HostChunk]:
        return self.stripe.chunks

    @property
    def payload_bytes(self) -> int:
        return self.stripe.payload.nbytes


@dataclass(frozen=True, eq=False)
class HostLoaded:
    """What is in memory needs no read."""

    ref: HostRef
    payload: Bytes | None
    error: str = ""
    began: float = 0.0
    ended: float = 0.0


_Key = tuple[int, bytes]  # start, parent digest


class HostTier:
    """Owns the copies, within a budget of bytes, before a store that it passes all else on to.

    Copies are of K/V, exact to the bit whatever the disk holds, and made when a sequence gives its
    pages back. They are found by owner, digest and ids as stripes on disk are, and go with a
    deleted chat. Those of the owners used least recently go first. Engine thread only.
    """

    def __init__(self, store: ChunkStore, budget_bytes: int) -> None:
        self.bytes_held = 0
        self._store = store
        self._budget = budget_bytes
        self._owners: OrderedDict[str, dict[_Key, HostStripe]] = OrderedDict()
        self._fingerprint = b""

    def keep(self, seq: TokenSequence, fingerprint: bytes, kv: Tensor) -> None:
        """Copy the K/V of a sequence's saved tokens, whose pages it still has; kv as of KVCache."""
        if fingerprint != self._fingerprint:
            self.collect(fingerprint)
        count = min(seq.num_saved, seq.num_computed)
        token_bytes = kv.shape[0] * 2 * kv.shape[3] * kv.shape[4] * kv.element_size()
        if not seq.saves or not count or count * token_bytes > self._budget:
            return
        held = self._owners.setdefault(seq.owner, {})
        self._owners.move_to_end(seq.owner)
        for page in range(-(-count // PAGE_SIZE)):
            start = page * PAGE_SIZE
            ids = seq.array(start, min(count, start + PAGE_SIZE))
            key = (seq.offset + start, seq.digest_before(page).value)
            before = held.get(key)
            if before is not None:
                if _common(before.ids, ids) == len(ids):
                    continue
                self.bytes_held -= before.payload.nbytes
            first = seq.page_ids[page] * PAGE_SIZE
            copy = kv[:, :, first : first + len(ids)].contiguous().cpu()
            payload = copy.view(-1).view(torch.uint8).numpy()
            held[key] = HostStripe(ids, payload, _chunks(len(kv), payload.nbytes))
            self.bytes_held += payload.nbytes
        while self.bytes_held > self._budget:
            self._let_go(next(iter(self._owners)))

    def find(
        self, owner: str, fingerprint: bytes, wanted: Sequence[tuple[int, bytes, TokenIds]]
    ) -> list[StripeRef | None]:
        """As of the store; what is in memory comes first where it is as long."""
        found = self._store.find(owner, fingerprint, wanted)
        held = self._owners.get(owner)
        if held is None or fingerprint != self._fingerprint:
            return found
        self._owners.move_to_end(owner)
        for i, (start, parent, ids) in enumerate(wanted):
            stripe = held.get((start, parent))
            usable = 0 if stripe is None else _common(stripe.ids, ids)
            on_disk = found[i]
            if stripe is not None and usable and (on_disk is None or usable >= on_disk.usable):
                found[i] = HostRef(start, usable, stripe)
        return found

    def read(self, owner: str, refs: Sequence[StripeRef], *, budget_bytes: int) -> ReadStream:
        """As of the store; what is in memory is there at once."""
        on_disk = [ref for ref in refs if not isinstance(ref, HostRef)]
        if len(on_disk) == len(refs):
            return self._store.read(owner, refs, budget_bytes=budget_bytes)
        stream = self._store.read(owner, on_disk, budget_bytes=budget_bytes) if on_disk else None
        return _Stream(refs, stream)

    def forget(self, owners: Sequence[str]) -> None:
        """Drop what is held of these owners, on disk too."""
        for owner in owners:
            self._let_go(owner)
        self._store.forget(owners)

    def collect(self, fingerprint: bytes) -> None:
        """Let go of all that is of another fingerprint, on disk too."""
        if fingerprint != self._fingerprint:
            self._owners.clear()
            self.bytes_held = 0
            self._fingerprint = fingerprint
        self._store.collect(fingerprint)

    def _let_go(self, owner: str) -> None:
        for stripe in self._owners.pop(owner, {}).values():
            self.bytes_held -= stripe.payload.nbytes

    # -- the store's own -----------------------------------------------------------------------

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
        self._store.append(
            owner=owner,
            fingerprint=fingerprint,
            start=start,
            parent_digest=parent_digest,
            ids=ids,
            chunks=chunks,
            payload=payload,
            done=done,
        )

    def flush(self, timeout_s: float) -> bool:
        return self._store.flush(timeout_s)

    @property
    def stripes_written(self) -> int:
        return self._store.stripes_written

    @property
    def stripes_dropped(self) -> int:
        return self._store.stripes_dropped

    @property
    def write_refusals(self) -> int:
        return self._store.write_refusals

    @property
    def write_trouble(self) -> str:
        return self._store.write_trouble

    @property
    def bytes_used(self) -> int:
        return self._store.bytes_used

    @property
    def bytes_cap(self) -> int:
        return self._store.bytes_cap

    def close(self) -> None:
        self._store.close()


class _Stream:
    """Stripes in the order of their refs: from memory at once, from disk as the store reads."""

    def __init__(self, refs: Sequence[StripeRef], stream: ReadStream | None) -> None:
        self._refs = refs
        self._stream = stream
        self._read: list[LoadedStripe] = []  # from disk, in order, not delivered yet
        self._delivered = 0
        self._cancelled = False

    def poll(self, timeout_s: float = 0.0) -> list[LoadedStripe]:
        if self._stream is not None:
            self._read.extend(self._stream.poll(timeout_s if self._blocked else 0.0))
        out: list[LoadedStripe] = []
        while not (self.finished or self._cancelled or self._blocked):
            ref = self._refs[self._delivered]
            if isinstance(ref, HostRef):
                out.append(HostLoaded(ref, ref.stripe.payload))
            else:
                out.append(self._read.pop(0))
            self._delivered += 1
        return out

    @property
    def _blocked(self) -> bool:
        """The next one is on disk and was not read yet."""
        if self.finished or self._read:
            return False
        return not isinstance(self._refs[self._delivered], HostRef)

    def release(self, stripe: LoadedStripe) -> None:
        if self._stream is not None and not isinstance(stripe, HostLoaded):
            self._stream.release(stripe)

    @property
    def finished(self) -> bool:
        return self._delivered == len(self._refs)

    @property
    def io_seconds(self) -> float:
        return 0.0 if self._stream is None else self._stream.io_seconds

    def cancel(self) -> None:
        self._cancelled = True
        self._read.clear()
        if self._stream is not None:
            self._stream.cancel()


@lru_cache(maxsize=128)
def _chunks(num_layers: int, num_bytes: int) -> tuple[HostChunk, ...]:
    each = num_bytes // num_layers
    return tuple(HostChunk(layer, layer * each, each) for layer in range(num_layers))


def _common(held: TokenIds, ids: TokenIds) -> int:
    """Length of the common beginning."""
    length = min(len(held), len(ids))
    differ = np.flatnonzero(held[:length] != ids[:length])
    return int(differ[0]) if len(differ) else length

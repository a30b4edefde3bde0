"""The chunk store: what a chat's K/V come back from, on SSD, under a hard cap of bytes."""

from sessions.chunks.open_store import check_open, owner_sizes
from sessions.chunks.reconcile import check
from sessions.chunks.report import CheckReport
from sessions.chunks.state import Counters
from sessions.chunks.store import ChunkStore
from sessions.chunks.types import ChunkStoreError, StoreLockedError

__all__ = [
    "CheckReport",
    "ChunkStore",
    "ChunkStoreError",
    "Counters",
    "StoreLockedError",
    "check",
    "check_open",
    "owner_sizes",
]

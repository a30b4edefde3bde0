"""Keeps the chats that were promised to stay in memory off the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from engine.messages import MEMORY_ONLY
from engine.restoration.chunk_store import ChunkStore

_OWNER = f"c-{MEMORY_ONLY}"


def without_memory_only(store: ChunkStore) -> ChunkStore:
    """The same store, which takes nothing of chats whose id begins with `MEMORY_ONLY`."""
    return cast(ChunkStore, _Filter(store))


class _Filter:
    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def append(self, *, owner: str, done: Callable[[bool], None], **stripe: Any) -> None:
        if owner.startswith(_OWNER):
            done(False)
        else:
            self._store.append(owner=owner, done=done, **stripe)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

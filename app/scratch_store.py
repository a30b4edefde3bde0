"""A chunk store to be measured and thrown away, on the disk of the real one."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sessions.chunks import ChunkStore

_PREFIX = "measuring-"
_CAP_BYTES = 1 << 30


@dataclass(frozen=True)
class ScratchStore:
    """An empty store in a directory of its own."""

    store: ChunkStore
    directory: Path

    def make_cold(self) -> None:
        """Have the page cache drop what was written, for file systems without direct reads."""
        for path in self.directory.iterdir():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


@contextlib.contextmanager
def scratch_store(parent: Path) -> Iterator[ScratchStore]:
    """A store below `parent`, made if missing; what a killed measurement left is removed.

    Raises OSError, and ChunkStoreError when its index cannot be made.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in parent.glob(f"{_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX) as name:
        store = ChunkStore([Path(name)], _CAP_BYTES)
        try:
            yield ScratchStore(store, Path(name))
        finally:
            store.close()

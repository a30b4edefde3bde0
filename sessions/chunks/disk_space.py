"""Room on the file systems of the chunk files, which others fill too."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KEPT_BYTES = 64 << 20  # left free for the database, the index and everybody else
KEPT_SHARE = 0.05  # of a small file system, where that is less


@dataclass(frozen=True, slots=True)
class Space:
    """A file system as a writer without special rights sees it; bytes."""

    free: int
    total: int

    @property
    def kept(self) -> int:
        """What chunk files leave free."""
        return min(KEPT_BYTES, int(self.total * KEPT_SHARE))

    def missing(self, need: int) -> int:
        """How much has to go before `need` more bytes fit; 0 or less when they do."""
        return need + self.kept - self.free


Measure = Callable[[Path], Space]


def measure(directory: Path) -> Space:
    """The file system that holds a directory. Raises OSError."""
    found = os.statvfs(directory)
    return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def same_device(directory: Path, other: Path) -> bool:
    """Whether deleting in one makes room in the other. Raises OSError."""
    return directory == other or os.stat(directory).st_dev == os.stat(other).st_dev


class NoSpace(OSError):
    """The disk is full, by our own measure, and no more of ours can be deleted on it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(errno.ENOSPC, "No space left on device", str(directory))

"""Chunk files in the store's directories."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sessions.chunks.types import StoreLockedError

INDEX_NAME = "index.sqlite3"
_LOCK_NAME = "lock"
_SUFFIX = ".chunks"
_CHUNK_FILE = re.compile(r"[0-9a-f]{32}\.chunks")


@dataclass(slots=True, eq=False)
class OpenFile:
    """A chunk file open for reading; `direct` when reads bypass the page cache."""

    fd: int
    direct: bool

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Bytes read at `offset`, 0 at the end. Buffer and offset are 4 KiB aligned.

        Raises OSError.
        """
        try:
            return os.preadv(self.fd, [buffer], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        # the file system took the flag and does not do it
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        return os.preadv(self.fd, [buffer], offset)

    def leave_no_trace(self, offset: int, num_bytes: int) -> None:
        """Have the page cache drop what was read."""
        if not self.direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def write_past_cache(fd: int, wanted: bool = True) -> bool:
    """Have writes to a file bypass the page cache, or not; False where the file system cannot.

    They are then of whole, aligned blocks. A stripe of 2 MiB costs less than half of the processor
    time that it takes through the cache, and the cores are the engine's.
    """
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~direct
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (direct if wanted else 0))
    except OSError:
        return False
    return bool(direct) and wanted


class Bounce:
    """Owns one buffer for direct writes, aligned, as large as the largest of them. One thread."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)

    def gather(self, buffers: Sequence[bytes | memoryview], total: int) -> memoryview:
        """The buffers one after another, `total` bytes; valid until the next call."""
        if len(self._map) < total:
            self._map = mmap.mmap(-1, total)
        whole = np.frombuffer(self._map, np.uint8, total)
        at = 0
        for buffer in buffers:
            if size := len(buffer):
                whole[at : at + size] = np.frombuffer(buffer, np.uint8)  # other threads run on
                at += size
        return memoryview(self._map)[:total]


class ChunkFiles:
    """Owns the names and places of chunk files; any thread may call it.

    Names are random and never made from an owner's name. A file's directory is found by looking,
    so that directories may be moved or given in another order.
    """

    def __init__(self, dirs: Sequence[Path]) -> None:
        """Create the directories and lock them. Raises StoreLockedError, ValueError, OSError."""
        if not dirs:
            raise ValueError("a chunk store needs at least one directory")
        self.dirs = tuple(Path(directory) for directory in dirs)
        self.index_path = self.dirs[0] / INDEX_NAME
        self._next_dir = 0
        self._places: dict[str, Path] = {}
        self._locks: list[int] = []
        try:
            for directory in self.dirs:
                self._take(directory)
        except StoreLockedError:
            self.unlock()
            raise

    def _take(self, directory: Path) -> None:
        """Make a directory and lock it. Raises StoreLockedError and OSError."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._locks.append(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLockedError(f"{directory} is in use by another process") from error

    @property
    def lost(self) -> bool:
        """A directory was removed behind our back, or the index with it."""
        return not self.index_path.exists() or not all(one.is_dir() for one in self.dirs)

    def make_anew(self) -> None:
        """Make what was removed, and lock it again. Raises StoreLockedError and OSError."""
        for directory in self.dirs:
            if not (directory / _LOCK_NAME).exists():
                self._take(directory)
        self._places.clear()

    def unlock(self) -> None:
        """Give the directories up; harmless when done before."""
        while self._locks:
            os.close(self._locks.pop())

    def create(self) -> tuple[str, int]:
        """A new, empty file in the next directory, and its descriptor for writing."""
        directory = self.dirs[self._next_dir % len(self.dirs)]
        self._next_dir += 1
        return self._create_in(directory)

    def create_beside(self, name: str) -> tuple[str, int]:
        """A new, empty file in the directory of `name`. Raises FileNotFoundError."""
        return self._create_in(self.path(name).parent)

    def _create_in(self, directory: Path) -> tuple[str, int]:
        name = uuid.uuid4().hex + _SUFFIX
        path = directory / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._places[name] = path
        return name, fd

    def path(self, name: str) -> Path:
        """Where the file lies. Raises FileNotFoundError when it is in none of the directories."""
        known = self._places.get(name)
        if known is not None:
            return known
        if _CHUNK_FILE.fullmatch(name):
            for directory in self.dirs:
                if (directory / name).exists():
                    self._places[name] = directory / name
                    return directory / name
        raise FileNotFoundError(name)

    def open_write(self, name: str) -> int:
        """A descriptor for writing to an existing file. Raises OSError."""
        return os.open(self.path(name), os.O_RDWR | os.O_CLOEXEC)

    def open_read(self, name: str) -> OpenFile:
        """Open for reading past the page cache where the file system can. Raises OSError."""
        path = self.path(name)
        flags = os.O_RDONLY | os.O_CLOEXEC
        direct = getattr(os, "O_DIRECT", 0)
        if direct:
            try:
                return OpenFile(os.open(path, flags | direct), True)
            except FileNotFoundError:
                raise
            except OSError:
                pass  # the file system has no direct I/O; an unreadable file fails again below
        return OpenFile(os.open(path, flags), False)

    def remove(self, name: str) -> bool:
        """Unlink the file; False when it could not be and still takes space."""
        try:
            self.path(name).unlink()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        self._places.pop(name, None)
        return True

    def sync_dirs(self, names: Iterable[str]) -> None:
        """Make the files' directory entries durable. Raises OSError."""
        for directory in {self.path(name).parent for name in names}:
            fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def listing(self) -> dict[str, int]:
        """Size in bytes of every chunk file; files with other names are not ours.

        A directory that somebody removed holds none.
        """
        sizes = {}
        for directory in self.dirs:
            with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
                for entry in entries:
                    if _CHUNK_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
                        self._places[entry.name] = Path(entry.path)
        return sizes

    def remove_index(self) -> None:
        """Unlink the index, wherever it lies, with its log."""
        for directory in self.dirs:
            for suffix in ("", "-wal", "-shm", "-journal"):
                (directory / (INDEX_NAME + suffix)).unlink(missing_ok=True)

    @property
    def stray_index(self) -> bool:
        """Another directory than the first has an index: it was used as another store."""
        return any((directory / INDEX_NAME).exists() for directory in self.dirs[1:])

"""JSON texts of any length cut into their values, which are neither built nor checked."""

from __future__ import annotations

import re
from typing import IO

MIB = 1 << 20
CHUNK_BYTES = 256 * 1024

_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^ \t\r\n,\]}]*")
_STRUCTURE = re.compile(rb'["{}\[\]]')
# The rest of a string after its opening quote; possessive, so that it keeps no way back.
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class JsonBroken(ValueError):
    """The text ends within a value, or a value is too long."""


class JsonCutter:
    """Owns a place in a file that is read forward; one thread may use it.

    `read_bytes` counts what was taken from the file, at most `size`.
    """

    def __init__(self, source: IO[bytes], size: int) -> None:
        self._source = source
        self._size = size
        self._buffer = b""
        self._at = 0
        self.read_bytes = 0
        self._fill()
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            self._at = 3

    def take(self, char: bytes) -> bool:
        """Skip white space, and this character if it comes next."""
        self._skip_space()
        found = self._buffer[self._at : self._at + 1] == char
        self._at += found
        return found

    def value(self, limit: int) -> bytes:
        """The next value as it is written. Raises JsonBroken: cut off, or over the limit."""
        self._skip_space()
        self._buffer, self._at = self._buffer[self._at :], 0
        if self._buffer[:1] in (b"{", b"["):
            end = self._balanced(limit)
        elif self._buffer[:1] == b'"':
            end = self._string(1, limit)
        else:
            end = self._scalar(limit)
        self._at = end
        return self._buffer[:end]

    def _balanced(self, limit: int) -> int:
        """Where the object or list ends that begins the buffer."""
        at = depth = 0
        while True:
            found = _STRUCTURE.search(self._buffer, at)
            if found is None:
                at = len(self._buffer)
                self._more(limit)
                continue
            at = found.end()
            if found.group() == b'"':
                at = self._string(at, limit)
            elif found.group() in (b"{", b"["):
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    return at

    def _string(self, at: int, limit: int) -> int:
        """Where the string ends whose characters begin at `at`."""
        while (match := _STRING.match(self._buffer, at)) is None:
            self._more(limit)
        return match.end()

    def _scalar(self, limit: int) -> int:
        while True:
            match = _SCALAR.match(self._buffer)
            assert match is not None, "it matches nothing too"
            if match.end() < len(self._buffer) or not self._fill():
                return match.end()
            if len(self._buffer) > limit:
                raise JsonBroken(f"it has over {limit // MIB:,} MiB.")

    def _skip_space(self) -> None:
        while True:
            match = _SPACE.match(self._buffer, self._at)
            assert match is not None, "it matches nothing too"
            self._at = match.end()
            if self._at < len(self._buffer) or not self._fill():
                return

    def _more(self, limit: int) -> None:
        if len(self._buffer) > limit:
            raise JsonBroken(f"it has over {limit // MIB:,} MiB.")
        if not self._fill():
            raise JsonBroken("the file is cut off in it.")

    def _fill(self) -> bool:
        """Read on, ever more of a long value, so that it is not gone through again and again."""
        room = self._size - self.read_bytes  # a zip file's own word is not taken for it
        data = self._source.read(min(max(CHUNK_BYTES, len(self._buffer)), room)) if room else b""
        self.read_bytes += len(data)
        self._buffer += data
        return bool(data)

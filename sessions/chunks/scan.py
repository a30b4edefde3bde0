"""Stripes as a chunk file itself tells them, for rebuilding and checking the index."""

from __future__ import annotations

import os
from dataclasses import dataclass

from crc32c import crc32c

from sessions.chunks.catalog import Stripe
from sessions.chunks.layout import ALIGN, MAGIC, Header, header_length, parse_header

_PIECE = 4 << 20  # bytes read at once


@dataclass(frozen=True, slots=True)
class Found:
    """A stripe with a sound header; `sound` when its payload is too."""

    offset: int
    header: Header
    sound: bool

    @property
    def end(self) -> int:
        return self.offset + self.header.total

    def stripe(self, file: str) -> Stripe:
        """The stripe, not numbered yet."""
        head = self.header
        return Stripe(
            0,
            file,
            self.offset,
            head.total,
            head.fingerprint,
            head.start,
            head.parent,
            head.ids,
            head.layout,
        )


def scan_file(fd: int, start: int = 0) -> list[Found]:
    """Stripes from `start` (bytes, aligned) on, checksums verified.

    After bytes that are no stripe the scan goes on at the next 4 KiB that begins like one. Raises
    OSError.
    """
    found = []
    size = os.fstat(fd).st_size
    at = start
    while at + ALIGN <= size:
        header = _read_header(fd, at)
        if header is None or at + header.total > size:
            at = _next_magic(fd, at + ALIGN, size)
            continue
        found.append(Found(at, header, _payload_sound(fd, at, header)))
        at += header.total
    return found


def _read_header(fd: int, at: int) -> Header | None:
    block = os.pread(fd, ALIGN, at)
    size = header_length(block)
    if size is None:
        return None
    if size > len(block):
        block = os.pread(fd, size, at)
    return parse_header(block)


def _payload_sound(fd: int, at: int, header: Header) -> bool:
    position = at + header.header_bytes
    left = header.layout.payload_bytes
    value = 0
    while left:
        piece = os.pread(fd, min(left, _PIECE), position)
        if not piece:
            return False
        value = crc32c(piece, value)
        position += len(piece)
        left -= len(piece)
    return value == header.crcs[-1]


def _next_magic(fd: int, at: int, size: int) -> int:
    """The first aligned place from `at` on where a stripe may begin; `size` when there is none."""
    while at < size:
        piece = os.pread(fd, _PIECE, at)
        if not piece:
            break
        for place in range(0, len(piece), ALIGN):
            if piece.startswith(MAGIC, place):
                return at + place
        at += len(piece)
    return size

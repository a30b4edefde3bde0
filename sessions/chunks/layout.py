"""The on-disk form of a stripe: header, then every layer's chunk, then zeros up to 4 KiB.

Header, little endian: magic, format version, token and layer counts, lengths of the two names,
header length, start, stripe length, parent digest | owner | fingerprint | ids int32 |
(layer, method, coding, offset, length) per layer | CRC32C per layer | CRC32C of all before it |
zeros up to 64 bytes. A layer's CRC32C continues that of the layer before it, so that the last one
covers the whole payload and a reader checks a stripe in one call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from crc32c import crc32c

ALIGN = 4096  # bytes; what direct I/O needs, and the unit of every offset and size
MAX_TOKENS = 64
MAX_HEADER = 1 << 18  # bytes
MAX_PAYLOAD = (1 << 32) - ALIGN - MAX_HEADER  # bytes
DIGEST_BYTES = 16
MAGIC = b"RJSTRIPE"
VERSION = 1

_FIXED = struct.Struct("<8sHHHBBIIQ16s")
_LAYER = struct.Struct("<HH12s12sII")
_NAME_BYTES = 12
_HEADER_ALIGN = 64  # payloads may be viewed as any element type


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a layer's chunk lies in a stripe's payload; bytes."""

    layer: int
    method: str
    coding: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Which chunks a payload holds, as objects and as the bytes of the header's layer table."""

    spec: bytes
    chunks: tuple[Chunk, ...]
    payload_bytes: int
    plan: tuple[tuple[int, str, str], ...]  # (layer, method, coding) in payload order


@dataclass(frozen=True, slots=True)
class Header:
    """A stripe header that passed its checksum."""

    owner: str
    fingerprint: bytes
    start: int
    parent: bytes
    ids: bytes
    layout: Layout
    crcs: tuple[int, ...]
    header_bytes: int
    total: int


def align_up(num_bytes: int, unit: int = ALIGN) -> int:
    """The smallest multiple of `unit` that holds `num_bytes`."""
    return -(-num_bytes // unit) * unit


def _name(text: str) -> bytes:
    raw = text.encode("ascii")
    if not 0 < len(raw) <= _NAME_BYTES or b"\0" in raw:
        raise ValueError(f"method or coding {text!r}: 1 to {_NAME_BYTES} ASCII characters")
    return raw


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii")


@lru_cache(maxsize=256)
def build_layout(chunks: tuple[tuple[int, str, str], ...], lengths: tuple[int, ...]) -> Layout:
    """The layout of chunks laid one after another.

    Raises ValueError when the counts differ, there is no chunk, or a number or name does not fit.
    """
    if len(chunks) != len(lengths) or not 0 < len(chunks) <= 0xFFFF:
        raise ValueError(f"{len(chunks)} chunks with {len(lengths)} buffers")
    if sum(lengths) > MAX_PAYLOAD:
        raise ValueError(f"payload of {sum(lengths)} bytes, at most {MAX_PAYLOAD}")
    spec = bytearray()
    offset = 0
    for (layer, method, coding), length in zip(chunks, lengths, strict=True):
        if not 0 <= layer <= 0xFFFF:
            raise ValueError(f"layer {layer}, at most 65535")
        spec += _LAYER.pack(layer, 0, _name(method), _name(coding), offset, length)
        offset += length
    return parse_layout(bytes(spec))


def parse_layout(spec: bytes) -> Layout:
    """The layout that `spec` spells. Raises ValueError when its chunks are not contiguous."""
    chunks = []
    end = 0
    try:
        for layer, _, method, coding, offset, length in _LAYER.iter_unpack(spec):
            if offset != end:
                raise ValueError(f"chunk of layer {layer} at {offset}, expected at {end}")
            end += length
            chunks.append(Chunk(layer, _text(method), _text(coding), offset, length))
    except struct.error as error:
        raise ValueError(f"layer table of {len(spec)} bytes") from error
    plan = tuple((chunk.layer, chunk.method, chunk.coding) for chunk in chunks)
    return Layout(spec, tuple(chunks), end, plan)


def header_bytes(owner: bytes, fingerprint: bytes, ids: bytes, layout: Layout) -> int:
    """Length of the header, that is the payload's offset in its stripe."""
    names = len(owner) + len(fingerprint)
    tables = len(ids) + len(layout.spec) + 4 * len(layout.chunks) + 4
    return align_up(_FIXED.size + names + tables, _HEADER_ALIGN)


def encode_head(
    owner: bytes, fingerprint: bytes, start: int, parent: bytes, ids: bytes, layout: Layout
) -> bytes:
    """The header up to its checksums: everything that says which stripe this is."""
    size = header_bytes(owner, fingerprint, ids, layout)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        len(ids) // 4,
        len(layout.chunks),
        len(owner),
        len(fingerprint),
        size,
        start,
        align_up(size + layout.payload_bytes),
        parent,
    )
    return b"".join((fixed, owner, fingerprint, ids, layout.spec))


def encode_header(head: bytes, crcs: Sequence[int]) -> bytes:
    """The whole header, zeros included."""
    body = head + struct.pack(f"<{len(crcs)}I", *crcs)
    body += struct.pack("<I", crc32c(body))
    return body.ljust(align_up(len(body), _HEADER_ALIGN), b"\0")


def header_length(block: bytes) -> int | None:
    """Header length told by a stripe's first bytes; None when no stripe of this version begins."""
    if len(block) < _FIXED.size:
        return None
    magic, version, tokens, layers, _, _, size, _, _, _ = _FIXED.unpack_from(block)
    if magic != MAGIC or version != VERSION or not 0 < tokens <= MAX_TOKENS or not layers:
        return None
    return int(size) if _FIXED.size < size <= MAX_HEADER else None


def parse_header(block: bytes) -> Header | None:
    """The header that `block` begins with; None when it is torn, foreign or fails its checksum."""
    size = header_length(block)
    if size is None or len(block) < size:
        return None
    _, _, tokens, layers, owner_len, print_len, _, start, total, parent = _FIXED.unpack_from(block)
    parts = []
    at = _FIXED.size
    for length in (owner_len, print_len, 4 * tokens, _LAYER.size * layers):
        parts.append(block[at : at + length])
        at += length
    end = at + 4 * layers
    if end + 4 > size or crc32c(block[:end]) != int.from_bytes(block[end : end + 4], "little"):
        return None
    owner, fingerprint, ids, spec = parts
    try:
        layout = parse_layout(spec)
        name = owner.decode()
    except ValueError:
        return None
    if total != align_up(size + layout.payload_bytes):
        return None
    crcs = struct.unpack_from(f"<{layers}I", block, at)
    return Header(name, fingerprint, start, parent, ids, layout, crcs, size, total)


def payload_crcs(buffers: Sequence[memoryview]) -> list[int]:
    """CRC32C of each chunk, each continuing the one before it."""
    crcs = []
    value = 0
    for buffer in buffers:
        value = crc32c(buffer, value)
        crcs.append(value)
    return crcs


def payload_error(payload: memoryview, layout: Layout, crcs: Sequence[int]) -> str:
    """What is wrong with the payload; empty when it is what was written."""
    if crc32c(payload) == crcs[-1]:
        return ""
    value = 0
    for chunk, crc in zip(layout.chunks, crcs, strict=True):
        if crc32c(payload[chunk.offset : chunk.offset + chunk.length], value) != crc:
            return f"checksum of layer {chunk.layer} ({chunk.method}) does not match"
        value = crc
    return "checksum of the payload does not match"


def stripe_error(stripe: memoryview, head: bytes, layout: Layout) -> str:
    """What is wrong with a stripe read whole, given the head it must have; empty when nothing."""
    layers = len(layout.chunks)
    end = len(head) + 4 * layers
    if len(stripe) < end + 4:
        return "shorter than its header"
    if stripe[: len(head)] != head:
        return "header is not that of the stripe in the index"
    if crc32c(stripe[:end]) != int.from_bytes(stripe[end : end + 4], "little"):
        return "checksum of the header does not match"
    at = align_up(end + 4, _HEADER_ALIGN)
    payload = stripe[at : at + layout.payload_bytes]
    if len(payload) != layout.payload_bytes:
        return "shorter than its payload"
    return payload_error(payload, layout, struct.unpack_from(f"<{layers}I", stripe, len(head)))

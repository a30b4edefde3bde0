"""Frames on the engine's socket: a 4-byte little-endian length, then one msgpack message."""

from __future__ import annotations

import msgspec

from engine.messages import FromEngine, ToEngine

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 28


def frame(message: msgspec.Struct) -> bytes:
    """One message with its header, ready to be sent."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class FrameSplitter:
    """Cuts a byte stream into message bodies, however the stream was cut before.

    Owned by one reader.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """The bodies that are complete now. Raises ValueError on a length over the limit."""
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            length = int.from_bytes(buffer[start : start + HEADER_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
            end = start + HEADER_BYTES + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + HEADER_BYTES : end]))
            start = end
        if start:
            del buffer[:start]
        return bodies


to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)

"""Digests of the first tokens of a chat, by which a prompt is found that begins with the same."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

FIRST = 64  # tokens after the system prompt; then twice as many each time


def boundaries(num_tokens: int) -> Iterator[int]:
    """How many tokens are digested of a path so long."""
    boundary = FIRST
    while boundary <= num_tokens:
        yield boundary
        boundary *= 2


def digests(user_id: str, prefix_ids: Sequence[int], ids: Sequence[int]) -> dict[bytes, int]:
    """Digest to the number of `ids` in it, `prefix_ids` before them; no two users share one."""
    state = hashlib.blake2b(user_id.encode(), digest_size=16)
    state.update(len(prefix_ids).to_bytes(4, "little"))
    state.update(array("i", prefix_ids).tobytes())
    found: dict[bytes, int] = {}
    start = 0
    for end in boundaries(len(ids)):
        state.update(array("i", ids[start:end]).tobytes())
        found[state.digest()] = end
        start = end
    return found

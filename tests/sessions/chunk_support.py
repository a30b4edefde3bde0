"""Chats with known bytes, and stores that must end in agreement with their files."""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sessions.chunks import CheckReport, ChunkStore, check
from sessions.chunks.layout import (
    align_up,
    build_layout,
    encode_head,
    encode_header,
    payload_crcs,
)

FINGERPRINT = b"weights-1"
LAYERS = ((0, "hidden", "fp32"), (3, "kv", "bf16"), (5, "kv", "bf16"))
WIDTHS = (96, 40, 24)  # bytes a token
STRIPE_BYTES = 12288  # a full stripe of these layers, in its file

Ids = npt.NDArray[np.int32]


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def memory_directory(otherwise: Path) -> Iterator[Path]:
    """A directory in memory where there is one, for tests whose many syncs need no disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def token_ids(seed: int, count: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 49152, count, dtype=np.int32)


def digest(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()


def rows(ids: Ids, start: int, layer: int) -> npt.NDArray[np.uint8]:
    """What layer number `layer` of LAYERS holds of these tokens, [num_tokens, width] uint8."""
    position = np.arange(start, start + len(ids))
    column = np.arange(WIDTHS[layer])
    mixed = (ids * 31 + position * 13 + layer * 7)[:, None] + column * 3
    return (mixed % 251).astype(np.uint8)


def stripes_of(ids: Ids) -> list[tuple[int, bytes, Ids]]:
    """(start, parent digest, ids) of each 64 tokens."""
    starts = range(0, len(ids), 64)
    return [(start, digest(ids[:start]), ids[start : start + 64]) for start in starts]


def save(
    store: ChunkStore,
    owner: str,
    ids: Ids,
    *,
    since: int = 0,
    fingerprint: bytes = FINGERPRINT,
    done: Callable[[bool], None] = lambda durable: None,
) -> None:
    """Append the stripes from the one that holds token `since` on, without waiting."""
    for start, parent, part in stripes_of(ids):
        if start + len(part) <= since:
            continue
        store.append(
            owner=owner,
            fingerprint=fingerprint,
            start=start,
            parent_digest=parent,
            ids=part,
            chunks=LAYERS,
            payload=[rows(part, start, i).reshape(-1) for i in range(len(LAYERS))],
            done=done,
        )


def restore(store: ChunkStore, owner: str, ids: Ids, *, fingerprint: bytes = FINGERPRINT) -> int:
    """Tokens that came back, each of them compared with what it must be."""
    wanted = stripes_of(ids)
    found = store.find(owner, fingerprint, wanted)
    assert len(found) == len(wanted)
    refs = [ref for ref in found if ref is not None]
    stream = store.read(owner, refs, budget_bytes=1 << 20)
    tokens = 0
    delivered = []
    while not stream.finished:
        loaded = stream.poll(10.0)
        assert loaded, "no stripe within 10 s"
        for stripe in loaded:
            delivered.append(stripe.ref)
            if stripe.payload is None:
                assert stripe.error
                continue
            start, n = stripe.ref.start, stripe.ref.usable
            assert 0 < n <= stripe.ref.num_tokens
            assert stripe.payload.nbytes == stripe.ref.payload_bytes
            for i, chunk in enumerate(stripe.ref.chunks):
                assert (chunk.layer, chunk.method, chunk.coding) == LAYERS[i]
                got = stripe.payload[chunk.offset : chunk.offset + chunk.length]
                got = got.reshape(stripe.ref.num_tokens, WIDTHS[i])
                want = rows(ids[start : start + n], start, i)
                np.testing.assert_array_equal(got[:n], want)
            tokens += n
            stream.release(stripe)
    assert delivered == refs
    return tokens


def write_unindexed(directory: Path, owner: str, ids: Ids) -> Path:
    """A chunk file with one stripe of up to 64 tokens, as after the loss of the index."""
    payload = [rows(ids, 0, i).reshape(-1) for i in range(len(LAYERS))]
    layout = build_layout(LAYERS, tuple(part.nbytes for part in payload))
    head = encode_head(owner.encode(), FINGERPRINT, 0, digest(ids[:0]), ids.tobytes(), layout)
    header = encode_header(head, payload_crcs([part.data for part in payload]))
    stripe = header + b"".join(part.tobytes() for part in payload)
    path = directory / f"{uuid.uuid4().hex}.chunks"
    path.write_bytes(stripe.ljust(align_up(len(stripe)), b"\0"))
    return path


def chunk_files(dirs: Sequence[Path]) -> list[Path]:
    return sorted(path for directory in dirs for path in directory.glob("*.chunks"))


def bytes_on_disk(dirs: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in chunk_files(dirs))


def assert_clean(dirs: Sequence[Path]) -> CheckReport:
    """Index and files of a closed store agree in every byte."""
    report = check(dirs)
    assert report.problems == []
    assert report.bytes == bytes_on_disk(dirs)
    return report


def end(store: ChunkStore, dirs: Sequence[Path]) -> CheckReport:
    """Close the store and check what it leaves."""
    assert store.flush(10.0)
    assert store.bytes_used == bytes_on_disk(dirs)
    store.close()
    return assert_clean(dirs)

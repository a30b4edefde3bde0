"""Rows of the index, told from what damage makes of them."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from sessions.chunks.catalog import Stripe
from sessions.chunks.layout import ALIGN, DIGEST_BYTES, MAX_TOKENS, align_up, header_bytes


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """An owner as the index has it; bytes."""

    id: int
    name: str
    file: str
    size: int
    live: int
    used: int  # tick of the last use


def owner_row(row: tuple[object, ...]) -> OwnerRow:
    """Raises sqlite3.DatabaseError when damage made the row what none can be."""
    owner_id, name, file, size, live, used = row
    if (
        isinstance(owner_id, int)
        and isinstance(name, str)
        and isinstance(file, str)
        and isinstance(size, int)
        and isinstance(live, int)
        and isinstance(used, int)
        and 0 <= live <= size < 1 << 62
        and size % ALIGN == 0
    ):
        return OwnerRow(owner_id, name, file, size, live, used)
    raise sqlite3.DatabaseError("a row of an owner is damaged")


def stripe_sound(stripe: Stripe, owner: str) -> bool:
    """False when damage made the row what no stripe can be."""
    blobs = (stripe.fingerprint, stripe.parent, stripe.ids)
    if not all(isinstance(blob, bytes) for blob in blobs):
        return False
    if not all(isinstance(n, int) for n in (stripe.offset, stripe.total, stripe.start)):
        return False
    size = header_bytes(owner.encode(), stripe.fingerprint, stripe.ids, stripe.layout)
    return (
        stripe.offset % ALIGN == 0
        and 0 <= stripe.offset < 1 << 62
        and stripe.total == align_up(size + stripe.layout.payload_bytes)
        and 0 <= stripe.start < 1 << 32
        and 0 < len(stripe.ids) <= 4 * MAX_TOKENS
        and len(stripe.ids) % 4 == 0
        and len(stripe.parent) == DIGEST_BYTES
    )


def is_damage(error: sqlite3.Error) -> bool:
    """The index is broken, as opposed to a full disk or an I/O error."""
    return not isinstance(error, sqlite3.OperationalError)


def is_shared(owner: str) -> bool:
    """Owners of shared prefixes, which are evicted last."""
    return owner.startswith("p-")

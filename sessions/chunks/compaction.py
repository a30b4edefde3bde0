"""Rewriting a file without its superseded stripes."""

from __future__ import annotations

import contextlib
import os
import sqlite3

from sessions.chunks.catalog import OwnerEntry, Stripe
from sessions.chunks.state import StoreState

_PIECE = 4 << 20  # bytes copied at once


def compact(state: StoreState, owner: str) -> None:
    """Copy the owner's live stripes, of every branch, to a new file and remove the old one.

    Copy -> fsync -> index commit -> unlink, so that a crash leaves one whole file in the index and
    another that start-up sweeps. Nothing is done while the copy does not fit on the disk, or under
    the cap without taking space from owners used later than this one. Raises OSError and
    sqlite3.Error.
    """
    with state.catalog.lock:
        entry = state.catalog.entry(owner)
        if entry is None or entry.size <= 2 * entry.live or state.catalog.reading[owner]:
            return
        state.catalog.busy = {owner}
        stripes = entry.all()
        live = entry.live
    try:
        if state.room_on_disk(entry.file, live) and state.make_room(
            live, {owner}, used_before=_last_used(state, owner)
        ):
            _rewrite(state, entry, stripes, live)
    finally:
        with state.catalog.lock:
            state.catalog.busy = set()


def _last_used(state: StoreState, owner: str) -> int:
    with state.catalog.lock:
        noted = state.catalog.touched.get(owner)
    if noted is not None:
        return noted
    row = state.index.find_owner(owner)
    return row.used if row else 0


def _rewrite(state: StoreState, entry: OwnerEntry, stripes: list[Stripe], live: int) -> None:
    old_file, old_size = entry.file, entry.size
    name, target = state.files.create_beside(old_file)
    source = -1
    state.reserved += live
    try:
        source = state.files.open_write(old_file)
        offsets = _copy(state, source, target, stripes)
        state.hook("compact.fsync")
        os.fsync(target)
        with contextlib.suppress(OSError):
            os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
        state.files.sync_dirs([name])
        state.hook("compact.commit")
        with state.index.transaction():
            state.index.move_stripes(offsets)
            state.index.set_file(entry.id, name, live, live)
    except (OSError, sqlite3.Error):
        if not state.files.remove(name):
            state.recount()
        raise
    finally:
        state.reserved -= live
        os.close(target)
        if source >= 0:
            os.close(source)
    with state.catalog.lock:
        entry.file, entry.size = name, live
        for stripe in stripes:
            stripe.file, stripe.offset = name, offsets[stripe.id]
    state.used += live
    state.counters.compactions += 1
    state.hook("compact.unlink")
    state.unlink(old_file, old_size)


def _copy(state: StoreState, source: int, target: int, stripes: list[Stripe]) -> dict[int, int]:
    """Copy stripes one after another; the new offset of each, by number. Raises OSError."""
    offsets = {}
    end = 0
    for stripe in stripes:
        state.hook("compact.copy")
        offsets[stripe.id] = end
        position, left = stripe.offset, stripe.total
        while left:
            piece = os.pread(source, min(left, _PIECE), position)
            if not piece:
                raise OSError(f"file ends in the middle of a stripe at {stripe.offset}")
            written = os.pwrite(target, piece, end)
            left -= written
            position += written
            end += written
    return offsets

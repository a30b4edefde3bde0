"""Stripes of recently used owners in memory, and the rules that compare their token ids."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sessions.chunks.layout import Chunk, Layout, encode_head

_MAX_ENTRIES = 512  # owners in memory; the others are loaded from the index when asked for


@dataclass(slots=True, eq=False)
class Stripe:
    """A durable stripe; `offset` is its place in `file`, bytes. Guarded by the catalog's lock."""

    id: int
    file: str
    offset: int
    total: int
    fingerprint: bytes
    start: int
    parent: bytes
    ids: bytes
    layout: Layout

    def head(self, owner: str) -> bytes:
        """What the stripe's header must begin with."""
        return encode_head(
            owner.encode(), self.fingerprint, self.start, self.parent, self.ids, self.layout
        )


@dataclass(frozen=True, slots=True)
class StripeRef:
    """A durable stripe that agrees with the ids asked for in its first `usable` tokens."""

    stripe: Stripe
    file: str
    offset: int
    usable: int

    @property
    def start(self) -> int:
        return self.stripe.start

    @property
    def num_tokens(self) -> int:
        return len(self.stripe.ids) // 4

    @property
    def chunks(self) -> Sequence[Chunk]:
        return self.stripe.layout.chunks

    @property
    def payload_bytes(self) -> int:
        return self.stripe.layout.payload_bytes


@dataclass(slots=True, eq=False)
class OwnerEntry:
    """One owner's file and live stripes. Changed under the catalog's lock."""

    id: int
    name: str
    file: str
    size: int  # bytes of the file, superseded stripes included
    stripes: dict[tuple[int, bytes], list[Stripe]] = field(default_factory=dict)

    def add(self, stripe: Stripe) -> None:
        self.stripes.setdefault((stripe.start, stripe.parent), []).append(stripe)

    def discard(self, stripe_id: int) -> Stripe | None:
        """Take the stripe out; None when it is not there (any more)."""
        for key, group in self.stripes.items():
            for stripe in group:
                if stripe.id == stripe_id:
                    group.remove(stripe)
                    if not group:
                        del self.stripes[key]
                    return stripe
        return None

    def same(self, stripe: Stripe) -> Stripe | None:
        """The live stripe that holds what `stripe` does, wherever it lies now."""
        for one in self.stripes.get((stripe.start, stripe.parent), ()):
            if (one.fingerprint, one.ids, one.layout.spec) == (
                stripe.fingerprint,
                stripe.ids,
                stripe.layout.spec,
            ):
                return one
        return None

    def all(self) -> list[Stripe]:
        """Live stripes in the order of the file."""
        stripes = [stripe for group in self.stripes.values() for stripe in group]
        return sorted(stripes, key=lambda stripe: stripe.offset)

    @property
    def live(self) -> int:
        """Bytes of live stripes."""
        return sum(stripe.total for group in self.stripes.values() for stripe in group)


def common_tokens(ours: bytes, theirs: bytes) -> int:
    """Number of leading int32 ids that agree."""
    shorter = min(len(ours), len(theirs))
    if ours[:shorter] == theirs[:shorter]:
        return shorter // 4
    left = np.frombuffer(ours, np.int32, shorter // 4)
    return int(np.argmax(left != np.frombuffer(theirs, np.int32, shorter // 4)))


def best_match(
    group: Iterable[Stripe], fingerprint: bytes, ids: bytes
) -> tuple[Stripe, int] | None:
    """The stripe with the most leading ids in common, the smallest of equals; None if none has."""
    best: Stripe | None = None
    usable = 0
    for stripe in group:
        if stripe.fingerprint != fingerprint:
            continue
        common = common_tokens(stripe.ids, ids)
        if common > usable or (best and common == usable and stripe.total < best.total):
            best, usable = stripe, common
    return (best, usable) if best else None


def superseded_by(new: Stripe, group: Iterable[Stripe]) -> list[Stripe]:
    """Stripes of `group` that `new` replaces: its ids extend theirs, or equal them."""
    return [
        old
        for old in group
        if old is not new and old.fingerprint == new.fingerprint and new.ids.startswith(old.ids)
    ]


def live_stripes(stripes: Iterable[Stripe]) -> list[Stripe]:
    """Those that no later one of the same owner supersedes, in the order of the file."""
    groups: dict[tuple[int, bytes], list[Stripe]] = {}
    for new in sorted(stripes, key=lambda stripe: stripe.offset):
        group = groups.setdefault((new.start, new.parent), [])
        for old in superseded_by(new, group):
            group.remove(old)
        group.append(new)
    return sorted((s for group in groups.values() for s in group), key=lambda s: s.offset)


def covers(old: Stripe, new: Stripe) -> bool:
    """`old` already holds all that `new` would: same layers and coding, ids that extend its own."""
    return (
        old.fingerprint == new.fingerprint
        and old.ids.startswith(new.ids)
        and old.layout.plan == new.layout.plan
    )


class Catalog:
    """Owns the in-memory entries; every field and entry is guarded by `lock`. Any thread."""

    def __init__(self, load: Callable[[str], OwnerEntry | None], tick: int) -> None:
        self.lock = threading.Lock()
        self.touched: dict[str, int] = {}  # owner -> time of last use, not yet in the index
        self.tick = tick
        self.reading: Counter[str] = Counter()  # open read streams
        self.doomed: Counter[str] = Counter()  # deletions asked for, not yet done
        self.rejected: set[int] = set()  # stripes found bad, not yet out of the index
        self.damaged = False  # the index cannot be read until it is made anew
        self.busy: set[str] = set()  # owners that the writer is about to change
        self._load = load
        self._entries: OrderedDict[str, OwnerEntry] = OrderedDict()

    def entry(self, owner: str) -> OwnerEntry | None:
        """The owner's entry, loaded if need be; None when nothing is held. Lock held."""
        entry = self._entries.get(owner)
        if entry is not None:
            self._entries.move_to_end(owner)
            return entry
        entry = self._load(owner)
        if entry is None:
            return None
        for stripe in entry.all():
            if stripe.id in self.rejected:
                entry.discard(stripe.id)
        self.put(entry)
        return entry

    def loaded(self, owner: str) -> OwnerEntry | None:
        """The owner's entry if it is in memory. Lock held."""
        return self._entries.get(owner)

    def reload_with(self, load: Callable[[str], OwnerEntry | None]) -> None:
        """Load entries from another, sound index from now on. Lock held."""
        self._entries.clear()
        self.rejected.clear()
        self.damaged = False
        self._load = load

    def put(self, entry: OwnerEntry) -> None:
        """Keep an entry, and let go of the least recently used ones. Lock held."""
        self._entries[entry.name] = entry
        self._entries.move_to_end(entry.name)
        if len(self._entries) > _MAX_ENTRIES:
            for name in list(self._entries):
                if name not in self.busy and name != entry.name:
                    del self._entries[name]
                    break

    def drop(self, owner: str) -> None:
        """Forget the copy in memory. Lock held."""
        self._entries.pop(owner, None)

    def clear(self) -> None:
        """Forget every copy in memory. Lock held."""
        self._entries.clear()

    def touch(self, owner: str) -> None:
        """Note a use. Lock held."""
        self.tick += 1
        self.touched[owner] = self.tick

    @property
    def num_loaded(self) -> int:
        return len(self._entries)

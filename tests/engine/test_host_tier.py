"""Chats that were evicted come back from host memory: exact, within its budget, never stale."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.sequence import IdDigest, Sequence
from engine.messages import Forget
from engine.restoration.chunk_store import ChunkStore, LoadedStripe, StripeRef, TokenIds
from engine.restoration.host_tier import HostRef, HostTier
from engine.restoration.stripes import find_stripes
from tests.engine.harness import Harness, HarnessFactory, Oracle, random_ids

PREFIX = random_ids(100, 1)
FINGERPRINT = b"f" * 16
BUDGET = 64 << 20


def evict(harness: Harness) -> None:
    resident = harness.engine.scheduler.resident
    while resident.evict_one():
        pass
    harness.engine.scheduler.check()


def turn(harness: Harness, history: list[int], new: list[int], chat: str = "a") -> str:
    computed = max(0, len(history) - 1)
    request = harness.submit(new, chat=chat, prefix=PREFIX, history=history, computed=computed)
    harness.run()
    return request


@pytest.mark.parametrize("method", ["hidden", "kv", "recompute"])
@pytest.mark.parametrize("bits", [16, 8])
def test_an_evicted_chat_comes_back_without_the_disk(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, method: str, bits: int
) -> None:
    """Exact whatever lies on disk, and its prefix too."""
    harness = make_engine(
        disk=tmp_path, checkpoint_method=method, checkpoint_bits=bits, host_cache_bytes=BUDGET
    )
    history = random_ids(300, 7)
    history += harness.ids(turn(harness, [], history))
    assert harness.store is not None
    for _ in range(2):
        evict(harness)
        assert harness.engine.stats().host_cache_bytes > 0
        harness.store.flush(10.0)
        harness.store.forget(["c-a", "p-"])  # the disk's, behind the tier's back
        new = random_ids(9, len(history))
        request = turn(harness, history, new)
        assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
        stats = harness.done(request).stats
        assert stats.restored_tokens == stats.restored_from_memory == len(history) - 1
        assert (stats.restore_bytes, stats.restore_method) == (0, "kv")
        assert stats.prefix_restored_tokens == len(PREFIX)
        history += new + harness.ids(request)
    assert harness.engine.stats().tokens_from_memory == harness.engine.stats().tokens_restored > 600


def test_a_deleted_chat_is_gone_from_memory_too(
    make_engine: HarnessFactory, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path, host_cache_bytes=BUDGET)
    first = random_ids(200, 7)
    turn(harness, [], first)
    evict(harness)
    held = harness.engine.stats().host_cache_bytes
    turn(harness, [], random_ids(64, 3), chat="resident")
    harness.engine.handle(Forget(call_id=1, chat_ids=["a", "resident"]))
    assert 0 < harness.engine.stats().host_cache_bytes < held  # the prefix's
    assert harness.done(turn(harness, first, random_ids(5, 5))).stats.restored_tokens == 0


def test_branches_take_the_leading_tokens(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path, host_cache_bytes=BUDGET)
    first = random_ids(150, 11)
    turn(harness, [], first)
    for keep in (100, 70, 130):
        evict(harness)
        history, new = first[:keep], random_ids(8, keep)
        request = turn(harness, history, new)
        assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
        stats = harness.done(request).stats
        assert stats.restored_tokens == keep - 1
        # where branches part, memory has the one that was evicted last; the disk has all
        assert stats.restored_from_memory == (keep - 1 if keep < 130 else 65)


def test_nothing_of_a_failed_step_is_kept(make_engine: HarnessFactory, tmp_path: Path) -> None:
    harness = make_engine(disk=tmp_path, host_cache_bytes=BUDGET)
    harness.submit(random_ids(200, 7), prefix=PREFIX)
    for _ in range(4):
        harness.step()
    harness.engine.fail_all("by the test")
    assert harness.engine.stats().host_cache_bytes == 0


# -- the tier by itself ------------------------------------------------------------------------


class Disk:
    """A store that holds stripes by (start, parent), and gives them when told to."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, bytes], StripeRef] = {}
        self.ready = 0
        self.forgotten: list[str] = []

    def find(
        self, owner: str, fingerprint: bytes, wanted: Seq[tuple[int, bytes, TokenIds]]
    ) -> list[StripeRef | None]:
        return [self.held.get((start, parent)) for start, parent, _ in wanted]

    def forget(self, owners: Seq[str]) -> None:
        self.forgotten += owners

    def collect(self, fingerprint: bytes) -> None: ...

    def read(self, owner: str, refs: Seq[StripeRef], *, budget_bytes: int) -> Slow:
        return Slow(self, list(refs))


class Slow:
    io_seconds = 0.0

    def __init__(self, disk: Disk, refs: list[StripeRef]) -> None:
        self.disk, self.refs = disk, refs

    @property
    def finished(self) -> bool:
        return not self.refs

    def poll(self, timeout_s: float = 0.0) -> list[Read]:
        count, self.disk.ready = min(self.disk.ready, len(self.refs)), 0
        out = [Read(ref) for ref in self.refs[:count]]
        del self.refs[:count]
        return out

    def release(self, stripe: LoadedStripe) -> None: ...
    def cancel(self) -> None: ...


class Read:
    payload, error, began, ended = np.zeros(1, np.uint8), "", 1.0, 2.0

    def __init__(self, ref: StripeRef) -> None:
        self.ref = ref


def sequence(owner: str, ids: list[int], pages: list[int]) -> Sequence:
    seq = Sequence(owner, ids, 0, IdDigest())
    seq.page_ids = pages
    seq.num_computed = seq.num_saved = len(ids)
    return seq


def tier_of(disk: Disk, budget: int) -> HostTier:
    store: ChunkStore = disk  # type: ignore[assignment]  # the parts that the tier calls
    return HostTier(store, budget)


def test_what_is_in_memory_and_what_is_on_disk_comes_in_order() -> None:
    disk = Disk()
    tier = tier_of(disk, 1 << 20)
    kv = torch.randn(2, 2, 6 * 64, 1, 16)
    ids = random_ids(300, 1)
    seq = sequence("c-a", ids, [5, 3, 0, 1, 2])
    tier.keep(seq, FINGERPRINT, kv)
    refs = find_stripes(tier, seq, FINGERPRINT, 0, 300)
    assert [ref.start for ref in refs] == [0, 64, 128, 192, 256]
    assert all(isinstance(ref, HostRef) for ref in refs)
    elsewhere = [
        HostRef(ref.start, ref.usable, ref.stripe) for ref in refs if isinstance(ref, HostRef)
    ]
    mixed: list[StripeRef] = list(elsewhere)
    for i in (1, 2, 4):
        mixed[i] = Elsewhere(elsewhere[i])
    stream = tier.read("c-a", mixed, budget_bytes=1 << 20)
    came = [s.ref.start for s in stream.poll(0.0)]
    assert came == [0]  # the next is on disk
    assert stream.poll(0.0) == []
    disk.ready = 2
    came += [s.ref.start for s in stream.poll(0.0)]
    assert came == [0, 64, 128, 192]
    assert not stream.finished
    disk.ready = 1
    came += [s.ref.start for s in stream.poll(0.0)]
    assert came == [ref.start for ref in refs]
    assert stream.finished
    first = elsewhere[0].stripe
    assert np.array_equal(
        first.payload.view(np.float32).reshape(2, 2, 64, 1, 16), kv[:, :, 5 * 64 : 6 * 64].numpy()
    )


class Elsewhere:
    """The same stripe, but on disk."""

    def __init__(self, ref: HostRef) -> None:
        self.start, self.usable, self.num_tokens = ref.start, ref.usable, ref.num_tokens
        self.chunks, self.payload_bytes = ref.chunks, ref.payload_bytes


def test_another_model_finds_nothing() -> None:
    tier = tier_of(Disk(), 1 << 20)
    seq = sequence("c-a", random_ids(64, 1), [0])
    tier.keep(seq, FINGERPRINT, torch.randn(2, 2, 64, 1, 16))
    assert find_stripes(tier, seq, b"g" * 16, 0, 64) == []
    tier.collect(b"g" * 16)
    assert tier.bytes_held == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "find", "forget"]),
            st.integers(0, 5),
            st.integers(1, 300),
            st.integers(0, 2),
        ),
        max_size=40,
    )
)
@settings(deadline=None)
def test_the_budget_holds_and_the_least_used_go_first(
    steps: list[tuple[str, int, int, int]],
) -> None:
    kv = torch.zeros(1, 2, 5 * 64, 1, 16)
    token_bytes = 2 * 16 * 4
    budget = 500 * token_bytes
    disk = Disk()
    tier = tier_of(disk, budget)
    used: list[str] = []  # owners with something in memory, the most recent last
    for what, number, length, variant in steps:
        owner = f"c-{number}"
        if what == "forget":
            tier.forget([owner])
            used = [one for one in used if one != owner]
        seq = sequence(owner, random_ids(length, variant), list(range(5)))
        if what == "keep":
            tier.keep(seq, FINGERPRINT, kv)
            used = [one for one in used if one != owner] + [owner]
        elif what == "find" and owner in used:
            find_stripes(tier, seq, FINGERPRINT, 0, length)
            used = [one for one in used if one != owner] + [owner]
        held = {
            name: sum(s.payload.nbytes for s in stripes.values())
            for name, stripes in tier._owners.items()
        }
        assert tier.bytes_held == sum(held.values()) <= budget
        assert list(held) == used[len(used) - len(held) :]
        used = list(held)

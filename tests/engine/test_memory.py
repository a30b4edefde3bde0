"""Pages and sequences: exact page ids, reference counts, digests."""

from __future__ import annotations

import hashlib

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE, PagePool, pages_for
from engine.memory.sequence import IdDigest, Sequence, common_length
from tests.engine.harness import random_ids


def test_the_lowest_free_pages_are_handed_out_in_order() -> None:
    pool = PagePool(6)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    pool.release([1, 3])
    assert pool.allocate(2) == [1, 3]
    assert pool.allocate(2) is None  # one is left: no change
    assert pool.num_free == 1
    assert pool.allocate(1) == [5]


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages == [0]
    pool.pin(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.check([pages])
    pool.release(pages)
    assert pool.num_free == 2
    pool.check([])


def test_what_is_free_can_be_neither_pinned_nor_released() -> None:
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page 1 is free"):
        pool.pin([1])
    with pytest.raises(ValueError, match="page 0 is free"):
        pool.release([0])


def test_the_check_sees_a_page_without_a_holder() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check([])


@given(st.lists(st.integers(0, 9), max_size=30))
def test_any_order_of_reserving_and_truncating_accounts_for_every_page(sizes: list[int]) -> None:
    pool = PagePool(8)
    held = [Sequence("a", [], 0, IdDigest()), Sequence("b", [], 0, IdDigest())]
    for i, size in enumerate(sizes):
        seq = held[i % 2]
        tokens = size * 37
        if tokens < len(seq.ids):
            seq.truncate(tokens, pool)
        elif seq.reserve(tokens, pool):
            seq.ids.extend([1] * (tokens - len(seq.ids)))
            assert len(seq.page_ids) == pages_for(tokens)
        pool.check([s.page_ids for s in held])


def digest(ids: list[int]) -> bytes:
    return hashlib.blake2b(np.array(ids, dtype="<i4").tobytes(), digest_size=16).digest()


def test_stripe_digests_cover_all_ids_before_them() -> None:
    prefix, ids = random_ids(70, 1), random_ids(200, 2)
    seq = Sequence("c", list(ids), 70, IdDigest(prefix))
    assert [seq.digest_before(k).value for k in (3, 0, 1)] == [
        digest(prefix + ids[: 64 * k]) for k in (3, 0, 1)
    ]
    pool = PagePool(4)
    seq.truncate(70, pool)
    seq.ids.extend([7] * 60)
    assert seq.digest_before(1).value == digest(prefix + ids[:64])
    assert seq.digest_before(2).value == digest(prefix + ids[:70] + [7] * 58)
    assert seq.digest_after().value == digest(prefix + ids[:70] + [7] * 60)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_length(a: list[int], b: list[int]) -> None:
    common = common_length(a, b)
    assert a[:common] == b[:common]
    assert common == min(len(a), len(b)) or a[common] != b[common]


def test_kv_memory_is_taken_as_it_is_written() -> None:
    """A pool for many chats costs what the chats in it cost."""
    before = psutil.Process().memory_info().rss
    cache = KVCache(4, 1024, 4, 64, torch.bfloat16)
    assert cache.kv.nbytes == 1024 * KVCache.bytes_per_page(4, 4, 64, torch.bfloat16)
    cache.k[3][-PAGE_SIZE:] = 1.0
    assert not cache.v[0][:PAGE_SIZE].any()
    assert psutil.Process().memory_info().rss - before < cache.kv.nbytes // 4

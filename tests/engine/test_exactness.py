"""Sharing, batching, eviction and restoring never change an answer (fp32, greedy).

The reference is transformers' own `generate` over the same token ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Harness, HarnessFactory, Oracle
from tests.engine.harness import random_ids as tokens

METHODS = ["hidden", "kv", "recompute"]
MAX_TOKENS = 12


PREFIX = tokens(100, 1)  # ends inside a page


def ask(
    harness: Harness, history: list[int], new: list[int], chat: str = "a", **sampling: Any
) -> tuple[list[int], str]:
    """One turn, run to its end; the answer's ids and the request's id."""
    request = harness.submit(new, chat=chat, prefix=PREFIX, history=history, **sampling)
    harness.run()
    return harness.ids(request), request


def test_greedy_equals_transformers(make_engine: HarnessFactory, oracle: Oracle) -> None:
    harness = make_engine()
    for length in (1, 63, 64, 65, 130):
        prompt = tokens(length, length)
        answer, _ = ask(harness, [], prompt, chat=f"c{length}")
        assert answer == oracle.greedy(PREFIX + prompt, MAX_TOKENS)


def test_no_prefix(make_engine: HarnessFactory, oracle: Oracle) -> None:
    harness = make_engine()
    prompt = tokens(40, 5)
    request = harness.submit(prompt)
    harness.run()
    assert harness.ids(request) == oracle.greedy(prompt, MAX_TOKENS)


@pytest.mark.parametrize("sharing", ["always", "never", "auto"])
@pytest.mark.parametrize("size", [1, 2, 5, 16, 64])
def test_batches_of_unequal_lengths(
    make_engine: HarnessFactory, oracle: Oracle, size: int, sharing: str
) -> None:
    harness = make_engine(share_prefix=sharing, prefill_chunk=48)
    expected: dict[str, list[int]] = {}
    for i in range(2 * size):
        prefix = PREFIX if i % 3 else PREFIX[:70]
        prompt = tokens(3 + 17 * (i % 19), 100 + i)
        ids, gap = oracle.choices(prefix + prompt, MAX_TOKENS)
        if gap > 5e-3 and len(expected) < size:  # rests on no tie
            expected[harness.submit(prompt, chat=f"c{i}", prefix=prefix)] = ids
    assert len(expected) == size
    harness.run()
    assert {request: harness.ids(request) for request in expected} == expected


def test_the_same_prompt_four_times(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    requests = [harness.submit(tokens(20, 3), chat=f"c{i}", prefix=PREFIX) for i in range(4)]
    harness.run()
    assert len({tuple(harness.ids(r)) for r in requests}) == 1


def test_every_turn_reuses_prefix_and_history(make_engine: HarnessFactory, oracle: Oracle) -> None:
    harness = make_engine()
    history: list[int] = []
    for turn in range(4):
        new = tokens(25, 30 + turn)
        computed = len(history) - (1 if history else 0)  # answers end by their length here
        request = harness.submit(new, prefix=PREFIX, history=history, computed=computed)
        harness.run()
        answer = harness.ids(request)
        assert answer == oracle.greedy(PREFIX + history + new, MAX_TOKENS)
        stats = harness.done(request).stats
        assert stats.resident_tokens == computed
        assert stats.recomputed_tokens == 0
        assert stats.prefix_computed_tokens == (100 if turn == 0 else 0)
        assert stats.tokens_in == (
            stats.prefix_tokens
            + stats.resident_tokens
            + stats.restored_tokens
            + stats.recomputed_tokens
            + stats.new_tokens
        )
        history += new + answer


@pytest.mark.parametrize("restart", [False, True], ids=["evicted", "restarted"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_restored_chat_answers_as_if_never_gone(
    make_engine: HarnessFactory,
    oracle: Oracle,
    tmp_path: Path,
    method: str,
    length: int,
    restart: bool,
) -> None:
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    first = tokens(length, 7)
    answer, _ = ask(harness, [], first)
    history = first + answer
    computed = len(history) - 1
    if restart:
        make_engine.close(harness)
        harness = make_engine(disk=tmp_path, checkpoint_method=method)
    else:
        assert harness.store is not None
        assert harness.store.flush(10.0)
        harness.engine.scheduler.resident.evict("a")
    new = tokens(9, 8)
    request = harness.submit(new, prefix=PREFIX, history=history, computed=computed)
    harness.run()
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, MAX_TOKENS)
    stats = harness.done(request).stats
    assert stats.resident_tokens == 0
    if method == "recompute":
        assert (stats.restored_tokens, stats.recomputed_tokens) == (0, computed)
    else:
        assert (stats.restored_tokens, stats.recomputed_tokens) == (computed, 0)
        assert stats.restore_method == method
        assert stats.restore_bytes > 0
        if restart:
            assert stats.prefix_restored_tokens == len(PREFIX)
            assert stats.prefix_computed_tokens == 0


@pytest.mark.parametrize("method", ["hidden", "kv"])
def test_many_returns_extend_the_same_stripes(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, method: str
) -> None:
    """The partial last stripe is taken up again after each return, so nothing is ever lost."""
    history: list[int] = []
    for turn in range(5):
        harness = make_engine(disk=tmp_path, checkpoint_method=method)
        new = tokens(19 + turn, 50 + turn)
        computed = max(0, len(history) - 1)
        request = harness.submit(new, prefix=PREFIX, history=history, computed=computed)
        harness.run()
        answer = harness.ids(request)
        assert answer == oracle.greedy(PREFIX + history + new, MAX_TOKENS)
        stats = harness.done(request).stats
        assert (stats.restored_tokens, stats.recomputed_tokens) == (computed, 0)
        history += new + answer
        make_engine.close(harness)


@pytest.mark.parametrize("method", ["hidden", "kv"])
def test_a_branch_that_leaves_inside_a_stripe(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, method: str
) -> None:
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    first = tokens(90, 11)
    answer, _ = ask(harness, [], first)
    other, _ = ask(harness, first[:70], tokens(8, 12))  # leaves at token 70
    assert other == oracle.greedy(PREFIX + first[:70] + tokens(8, 12), MAX_TOKENS)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    for history in (first + answer, first[:70] + tokens(8, 12) + other):
        new = tokens(5, 13)
        request = harness.submit(new, prefix=PREFIX, history=history, computed=len(history) - 1)
        harness.run()
        assert harness.ids(request) == oracle.greedy(PREFIX + history + new, MAX_TOKENS)
        stats = harness.done(request).stats
        assert stats.recomputed_tokens == 0
        assert stats.restored_tokens + stats.resident_tokens == len(history) - 1


@pytest.mark.parametrize("method", METHODS)
def test_preemption_changes_nothing(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, method: str
) -> None:
    page = 3 * 2 * 64 * 2 * 64 * 4
    harness = make_engine(
        disk=tmp_path, checkpoint_method=method, kv_memory_bytes=10 * page, max_context=500
    )
    prompts = [tokens(50 + 5 * i, 60 + i) for i in range(6)]
    requests = [
        harness.submit(p, chat=f"c{i}", prefix=PREFIX, max_tokens=90) for i, p in enumerate(prompts)
    ]
    harness.run()
    assert harness.engine.stats().preemptions > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert harness.ids(request) == oracle.greedy(PREFIX + prompt, 90)


def test_others_decode_while_a_chat_is_restored(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path, checkpoint_method="hidden")
    first = tokens(600, 21)
    answer, _ = ask(harness, [], first)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path, checkpoint_method="hidden")
    running = harness.submit(tokens(10, 26), chat="b", prefix=PREFIX, max_tokens=40)
    while len(harness.ids(running)) < 3:
        harness.step()
    history, new = first + answer, tokens(5, 34)
    request = harness.submit(new, prefix=PREFIX, history=history, computed=len(history) - 1)
    harness.run()
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, MAX_TOKENS)
    assert harness.ids(running) == oracle.greedy(PREFIX + tokens(10, 26), 40)
    phases = [s.phase for s in harness.statuses(request)]
    assert "restoring" in phases

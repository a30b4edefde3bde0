"""Turns that are not saved: they go on from a chat, and leave nothing of themselves with it.

The reference is transformers' own `generate` over the same token ids.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.messages import Warm
from tests.engine.harness import Harness, HarnessFactory, Oracle
from tests.engine.harness import random_ids as tokens

SYSTEM = tokens(70, 1)
MAX_TOKENS = 8


def ask(harness: Harness, ids: list[int], known: int, *, saves: bool = True) -> str:
    """One turn over all these ids, of which `known` are history; run to its end."""
    request = harness.submit(
        ids[known:],
        prefix=SYSTEM,
        scope="s",
        history=ids[:known],
        saves=saves,
        max_tokens=MAX_TOKENS,
    )
    harness.run()
    return request


def stored(harness: Harness) -> int:
    """Bytes on disk once everything is written."""
    assert harness.store is not None
    assert harness.store.flush(timeout_s=5)
    return harness.store.bytes_used


def restarted(make_engine: HarnessFactory, harness: Harness, disk: Path) -> Harness:
    make_engine.close(harness)
    return make_engine(disk=disk)


def test_a_chat_of_unsaved_turns_is_never_on_disk(
    make_engine: HarnessFactory, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path)
    first = harness.submit(tokens(200, 1), saves=False)
    harness.run()
    assert harness.done(first).stats.resident_tokens == 0
    assert stored(harness) == 0
    again = harness.submit(tokens(200, 1), saves=False)
    harness.run()
    assert harness.done(again).stats.resident_tokens == 199
    assert stored(harness) == 0
    assert not any("c-" in path.name for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("common", [64, 100, 128, 199, 205])
def test_from_memory(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, common: int
) -> None:
    """It shares what agrees; the chat goes on as if it had never been."""
    harness = make_engine(disk=tmp_path)
    chat = tokens(200, 2)
    first = ask(harness, chat, 0)
    chat += harness.ids(first)
    before = stored(harness)
    borrowed = chat[:common] + tokens(90, 3)
    request = ask(harness, borrowed, common, saves=False)
    assert harness.ids(request) == oracle.greedy(SYSTEM + borrowed, MAX_TOKENS)
    assert harness.done(request).stats.resident_tokens == common
    again = borrowed + harness.ids(request) + tokens(5, 4)
    request = ask(harness, again, len(again) - 5, saves=False)
    assert harness.done(request).stats.resident_tokens >= len(again) - 6, "it is in memory too"
    assert harness.ids(request) == oracle.greedy(SYSTEM + again, MAX_TOKENS)
    assert stored(harness) == before
    own = chat + tokens(20, 5)
    request = ask(harness, own, len(chat))
    assert harness.done(request).stats.resident_tokens == len(chat) - 1, "all that had K/V"
    assert harness.ids(request) == oracle.greedy(SYSTEM + own, MAX_TOKENS)


def test_what_was_not_saved_is_no_part_of_a_saved_chat(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """The same words sent in the chat itself are read again there, and then all are on disk."""
    harness = make_engine(disk=tmp_path)
    chat = tokens(200, 2)
    chat += harness.ids(ask(harness, chat, 0))
    longer = chat + tokens(150, 3)
    ask(harness, longer, len(chat), saves=False)
    own = ask(harness, longer, len(chat))
    assert harness.ids(own) == oracle.greedy(SYSTEM + longer, MAX_TOKENS)
    longer += harness.ids(own)
    stored(harness)
    harness = restarted(make_engine, harness, tmp_path)
    request = ask(harness, longer + tokens(5, 4), len(longer))
    stats = harness.done(request).stats
    assert (stats.restored_tokens, stats.recomputed_tokens) == (len(longer) - 1, 1)


@pytest.mark.parametrize("warm", [False, True])
def test_from_disk(make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, warm: bool) -> None:
    harness = make_engine(disk=tmp_path)
    chat = tokens(300, 2)
    chat += harness.ids(ask(harness, chat, 0))
    before = stored(harness)
    harness = restarted(make_engine, harness, tmp_path)
    if warm:
        harness.engine.handle(
            Warm(chat_id="a", prefix_ids=SYSTEM, history_ids=chat[:-1], prefix_scope="s")
        )
        harness.step()
    borrowed = chat[:-1] + tokens(30, 3)
    request = ask(harness, borrowed, len(chat) - 1, saves=False)
    stats = harness.done(request).stats
    assert stats.restored_tokens + stats.resident_tokens == len(chat) - 1
    assert harness.ids(request) == oracle.greedy(SYSTEM + borrowed, MAX_TOKENS)
    assert stored(harness) == before
    own = chat + tokens(20, 5)
    request = ask(harness, own, len(chat))
    assert harness.ids(request) == oracle.greedy(SYSTEM + own, MAX_TOKENS)
    assert harness.done(request).stats.new_tokens == 20


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, seed: int
) -> None:
    """Saved and unsaved turns at once, under pressure; what was saved all comes back."""
    rng = random.Random(seed)
    harness = make_engine(disk=tmp_path, kv_memory_bytes=8 << 20, prefill_chunk=48)
    chat = tokens(rng.randrange(60, 140), seed)
    chat += harness.ids(ask(harness, chat, 0))
    for turn in range(4):
        aside: dict[str, list[int]] = {}
        for number in range(rng.randrange(3)):
            cut = rng.randrange(len(chat))
            ids = chat[:cut] + tokens(rng.randrange(1, 130), 100 * turn + number)
            request = harness.submit(
                ids[cut:],
                prefix=SYSTEM,
                scope="s",
                history=ids[:cut],
                saves=False,
                max_tokens=MAX_TOKENS,
            )
            aside[request] = ids
            for _ in range(rng.randrange(4)):
                harness.step()
        own = chat + tokens(rng.randrange(1, 80), 7 + turn)
        request = ask(harness, own, len(chat))
        for other, ids in aside.items():
            assert harness.ids(other) == oracle.choices(SYSTEM + ids, MAX_TOKENS)[0]
        assert harness.ids(request) == oracle.choices(SYSTEM + own, MAX_TOKENS)[0]
        chat = own + harness.ids(request)
    stored(harness)
    harness = restarted(make_engine, harness, tmp_path)
    request = ask(harness, [*chat, 9], len(chat))
    stats = harness.done(request).stats
    assert stats.restored_tokens >= len(chat) - 1, "without a hole"

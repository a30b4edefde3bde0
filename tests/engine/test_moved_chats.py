"""Chats whose prefix is replaced by another version: never old state under the new one (fp32).

The reference is transformers' own `generate` over the new token ids.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.messages import Forget, Forgotten, PrefixUse
from tests.engine.harness import Harness, HarnessFactory, Oracle
from tests.engine.harness import random_ids as tokens

OLD = tokens(100, 1)
NEW = {
    "as long, other words": tokens(100, 7),
    "as long, other end": OLD[:99] + tokens(1, 9),
    "shorter": tokens(63, 8),
    "longer, the same beginning": OLD + tokens(90, 4),
    "a word put before it": tokens(1, 5) + OLD,
}
FIRST, SECOND, THIRD = tokens(70, 11), tokens(9, 12), tokens(5, 13)


def _turn(harness: Harness, prefix: list[int], history: list[int], new: list[int]) -> str:
    request = harness.submit(new, prefix=prefix, scope="s", history=history)
    harness.run()
    return request


@pytest.mark.parametrize(("change", "forgotten"), [*zip(NEW, [True, False] * 3, strict=False)])
def test_a_moved_chat_answers_as_if_it_had_always_had_its_prefix(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, change: str, forgotten: bool
) -> None:
    """In memory at the move, then back from disk after it; whether or not the old file went."""
    new = NEW[change]
    harness = make_engine(disk=tmp_path)
    first = _turn(harness, OLD, [], FIRST)
    history = FIRST + harness.ids(first)
    assert harness.ids(first) == oracle.greedy(OLD + FIRST, 12)
    if forgotten:
        harness.engine.handle(Forget(call_id=1, chat_ids=["a"]))
        assert isinstance(harness.events[-1], Forgotten)

    second = _turn(harness, new, history, SECOND)
    assert harness.ids(second) == oracle.greedy(new + history + SECOND, 12)
    stats = harness.done(second).stats
    assert (stats.resident_tokens, stats.restored_tokens) == (0, 0), "old state is of no use"
    assert stats.recomputed_tokens == len(history)
    [use] = harness.engine.stats().prefixes
    assert (use.scope, use.chats, use.chat_tokens) == ("s", 1, len(new))

    history += SECOND + harness.ids(second)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    third = _turn(harness, new, history, THIRD)
    assert harness.ids(third) == oracle.greedy(new + history + THIRD, 12)
    stats = harness.done(third).stats
    assert stats.restored_tokens == len(history) - 1, "the new state comes back"


def test_a_prefix_is_counted_once_however_many_chats_have_it(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    assert harness.engine.stats().prefixes == ()
    for chat in ("a", "b", "c"):
        harness.submit(tokens(3, ord(chat)), chat=chat, prefix=OLD, scope="s")
    harness.submit(tokens(3, 5), chat="d", prefix=tokens(40, 6), scope="t")
    harness.submit(tokens(3, 6), chat="alone")
    harness.step()
    running = {use.scope: use.chats for use in harness.engine.stats().prefixes}
    assert running == {"s": 3, "t": 1}, "running ones count"
    harness.run()
    assert harness.engine.stats().prefixes == (
        PrefixUse(scope="s", held_tokens=100, chats=3, chat_tokens=300),
        PrefixUse(scope="t", held_tokens=40, chats=1, chat_tokens=40),
    )
    for chat in ("a", "b", "c", "d"):
        harness.engine.scheduler.resident.evict(chat)
    assert [use.chats for use in harness.engine.stats().prefixes] == [0, 0]

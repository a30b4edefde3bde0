"""Trees of shared tokens: of any depth, split and joined as chats branch, never wrong (fp32).

The reference is transformers' own `generate` over the same token ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.page_pool import pages_for
from engine.memory.prefix_tree import PrefixNode, Root
from engine.messages import Cancel
from engine.model.attention import FixedGate, Gate
from tests.engine.harness import Harness, HarnessFactory, Oracle, make_tiny_model
from tests.engine.harness import random_ids as tokens

MAX_TOKENS = 8
SYSTEM, BOOK, POEM = tokens(100, 1), tokens(150, 2), tokens(64, 3)
SHARING = ["always", "never", "mixed"]
Shape = list[tuple[int, Any]]


class MixedGate:
    """Shares some nodes and not others, and of those that it shares not always."""

    def shares(self, num_tokens: int, num_rows: int) -> bool:
        return (num_tokens // 4 + num_rows) % 3 > 0


def gated(harness: Harness, sharing: str) -> Harness:
    """Have this gate decide for every step, whatever was measured."""
    gates: dict[str, Gate] = {"always": FixedGate(True), "never": FixedGate(False)}
    harness.engine.runner._gate = gates.get(sharing, MixedGate())
    return harness


def shape(root: Root | PrefixNode) -> Shape:
    """The tree below a root or a node: for each child its length and what is below it."""
    return [(len(child), shape(child)) for child in root.children]


def prefixes(harness: Harness, scope: str = "s") -> Shape:
    return shape(harness.engine.scheduler.tree.prefixes[scope])


def chat_tree(harness: Harness, chat: str) -> Shape:
    return shape(harness.engine.scheduler.tree.chats[chat])


def ask(
    harness: Harness, history: list[int], new: list[int], *, computed: int | None = None
) -> tuple[str, list[int]]:
    """One turn of chat "a" below SYSTEM, run to its end: the request, and the answer's ids."""
    request = harness.submit(
        new, prefix=SYSTEM, scope="s", history=history, computed=computed, max_tokens=MAX_TOKENS
    )
    harness.run()
    return request, harness.ids(request)


def expected(oracle: Oracle, ids: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    return oracle.greedy(SYSTEM + ids, max_tokens)


# -- prefixes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARING)
def test_prefixes_of_a_scope_share_their_common_pages(
    make_engine: HarnessFactory, oracle: Oracle, sharing: str
) -> None:
    """A system prompt, the same with two documents, with both, and its own first 64 tokens."""
    harness = gated(make_engine(), sharing)
    chains = [
        SYSTEM,
        SYSTEM + BOOK,
        SYSTEM + BOOK + POEM,
        SYSTEM + POEM,
        SYSTEM[:64],
        SYSTEM[:63],
        SYSTEM[:1],
        [],
    ]
    requests: dict[str, list[int]] = {}
    for turn in range(2):
        for i, prefix in enumerate(chains):
            for j in range(1 + i % 3):
                prompt = tokens(3 + i + 5 * j, 10 + 31 * i + 7 * j + turn)
                request = harness.submit(
                    prompt, chat=f"{turn} {i} {j}", prefix=prefix, scope="s", max_tokens=MAX_TOKENS
                )
                requests[request] = oracle.greedy(prefix + prompt, MAX_TOKENS)
        harness.run()
    assert {request: harness.ids(request) for request in requests} == requests
    # 64 tokens that five begin with; [:63] and [:1] fill no page. Below: the rest of SYSTEM, the
    # two pages that both books fill, and the poem; below those pages what is left of each.
    top = sorted(prefixes(harness))
    assert [length for length, _ in top] == [1, 63, 64]
    assert [sorted(below) for _, below in top] == [
        [],
        [],
        [(36, []), (100, []), (128, [(58, []), (122, [])])],
    ]
    shared = harness.engine.runner.prefix_tokens_shared
    assert (shared == 0) == (sharing == "never")


def test_a_prefix_of_another_scope_is_another_copy(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    for scope in ("s", "t"):
        request = harness.submit(tokens(5, 1), chat=scope, prefix=SYSTEM, scope=scope)
        harness.run()
        assert harness.done(request).stats.prefix_computed_tokens == len(SYSTEM)
    assert prefixes(harness, "s") == prefixes(harness, "t") == [(100, [])]


def test_a_split_prefix_comes_back_from_one_checkpoint(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """What was saved as one node is restored as two, and the other way round."""
    harness = make_engine(disk=tmp_path)
    for chat, prefix in (("a", SYSTEM + BOOK), ("b", SYSTEM + POEM)):
        harness.submit(tokens(4, 5), chat=chat, prefix=prefix, scope="s")
        harness.run()
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    for chat, prefix in (("c", SYSTEM + POEM), ("d", SYSTEM + BOOK)):
        request = harness.submit(
            tokens(4, 6), chat=chat, prefix=prefix, scope="s", max_tokens=MAX_TOKENS
        )
        harness.run()
        assert harness.ids(request) == oracle.greedy(prefix + tokens(4, 6), MAX_TOKENS)
        stats = harness.done(request).stats
        assert stats.prefix_computed_tokens == 0
        assert stats.prefix_restored_tokens == len(prefix) - (64 if chat == "d" else 0)


def test_a_prefix_is_split_only_when_it_is_there(
    make_engine: HarnessFactory, oracle: Oracle
) -> None:
    """Two prefixes with a common beginning at once: the second waits for the first."""
    harness = make_engine(prefill_chunk=32)
    asked = {
        harness.submit(
            tokens(6, i), chat=str(i), prefix=SYSTEM + tail, scope="s", max_tokens=MAX_TOKENS
        ): oracle.greedy(SYSTEM + tail + tokens(6, i), MAX_TOKENS)
        for i, tail in enumerate((BOOK, POEM, BOOK))
    }
    harness.run()
    assert {request: harness.ids(request) for request in asked} == asked
    assert prefixes(harness) == [(64, [(186, []), (100, [])])]


# -- branches of a chat ------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARING)
def test_branches_share_the_history_before_them(
    make_engine: HarnessFactory, oracle: Oracle, sharing: str
) -> None:
    harness = gated(make_engine(), sharing)
    first, second = tokens(150, 20), tokens(90, 21)
    _, one = ask(harness, [], first)
    history = first + one
    _, two = ask(harness, history, second, computed=len(history) - 1)
    assert chat_tree(harness, "a") == [(len(history + second + two) - 1, [])]
    # the second answer is edited at its beginning: 158 tokens are common, 128 of them whole pages
    edited = tokens(80, 44)
    request, other = ask(harness, history, edited, computed=len(history) - 1)
    assert other == expected(oracle, history + edited)
    assert harness.done(request).stats.resident_tokens == len(history)
    rest = len(history) - 128
    assert chat_tree(harness, "a") == [
        (128, [(rest + len(second + two) - 1, []), (rest + len(edited + other) - 1, [])])
    ]
    # back to the first branch: all of it is still there
    whole = history + second + two
    request, more = ask(harness, whole, tokens(7, 23), computed=len(whole) - 1)
    assert more == expected(oracle, whole + tokens(7, 23))
    assert harness.done(request).stats.resident_tokens == len(whole) - 1


def test_a_branch_alone_is_joined_with_what_is_before_it(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    first = tokens(200, 24)
    ask(harness, [], first)
    _, other = ask(harness, [], first[:130] + tokens(90, 25))
    (upper,) = harness.engine.scheduler.tree.chats["a"].children
    assert [len(upper), len(upper.children)] == [128, 2]
    resident = harness.engine.scheduler.resident
    dropped, kept = upper.children
    resident._drop(dropped)
    whole = first[:130] + tokens(90, 25) + other
    request, _ = ask(harness, whole, tokens(4, 26), computed=len(whole) - 1)
    assert harness.done(request).stats.resident_tokens == len(whole) - 1
    assert chat_tree(harness, "a") == [(len(whole) + 4 + MAX_TOKENS - 1, [])]
    assert kept.seq.offset == 0


def test_a_short_rest_of_a_branch_is_cut_rather_than_kept(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    first = tokens(200, 27)
    ask(harness, [], first)
    request, other = ask(harness, [], first[:160] + tokens(30, 28))
    assert harness.done(request).stats.resident_tokens == 160
    assert chat_tree(harness, "a") == [(160 + 30 + len(other) - 1, [])]


@pytest.mark.parametrize("method", ["hidden", "kv"])
def test_branches_come_back_from_disk(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, method: str
) -> None:
    """Also the stripe in which they part, whose first tokens were copied, not computed."""
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    first = tokens(300, 29)
    branches = []
    for i, at in enumerate((300, 100, 170, 70)):
        own = first[:at] + tokens(70, 30 + i)
        _, answer = ask(harness, [], own)
        assert answer == expected(oracle, own)
        branches.append(own + answer)
    assert harness.engine.stats().stripes_dropped == 0
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    for history in branches[::-1]:
        request, answer = ask(harness, history, tokens(9, 40), computed=len(history) - 1)
        assert answer == expected(oracle, history + tokens(9, 40))
        stats = harness.done(request).stats
        assert stats.recomputed_tokens == 0
        assert stats.resident_tokens + stats.restored_tokens == len(history) - 1


# -- candidates --------------------------------------------------------------------------------


def candidates(harness: Harness, prompt: list[int], count: int, **sampling: Any) -> list[str]:
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, **sampling}
    return [
        harness.submit(prompt, prefix=SYSTEM, scope="s", candidate=i, **options)
        for i in range(count)
    ]


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_candidates_share_the_whole_chat(
    make_engine: HarnessFactory, oracle: Oracle, length: int, sharing: str
) -> None:
    harness = gated(make_engine(prefill_chunk=48), sharing)
    prompt = tokens(length, 50 + length)
    requests = candidates(harness, prompt, 4)
    most = 0
    while harness.engine.has_work():
        harness.step()
        most = max(
            most, harness.engine.scheduler.pool.num_pages - harness.engine.stats().pages_free
        )
    answer = expected(oracle, prompt)
    assert [harness.ids(request) for request in requests] == [answer] * 4
    shared = (length - 1) // 64 * 64
    tails = 4 * pages_for(length - shared + MAX_TOKENS)
    assert most <= pages_for(len(SYSTEM)) + shared // 64 + tails
    turns = [harness.done(request).stats for request in requests]
    assert [turn.resident_tokens + turn.new_tokens for turn in turns] == [length] * 4
    assert [turn.new_tokens for turn in turns] == [length, 1, 1, 1]


def test_candidates_differ_by_their_number_alone(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    prompt = tokens(90, 60)
    noise: dict[str, Any] = {"temperature": 4.0, "seed": 11, "top_p": 1.0}
    together = [harness.ids(r) for r in _run(harness, candidates(harness, prompt, 4, **noise))]
    assert len({tuple(ids) for ids in together}) == 4
    for i, ids in enumerate(together):
        alone = make_engine()
        request = alone.submit(
            prompt, prefix=SYSTEM, scope="s", candidate=i, max_tokens=MAX_TOKENS, **noise
        )
        alone.run()
        assert alone.ids(request) == ids


def _run(harness: Harness, requests: list[str]) -> list[str]:
    harness.run()
    return requests


def test_a_cancelled_candidate_leaves_the_others(
    make_engine: HarnessFactory, oracle: Oracle
) -> None:
    harness = make_engine(prefill_chunk=32)
    prompt = tokens(130, 61)
    for victim, steps in ((0, 2), (0, 9), (1, 9), (2, 1)):
        requests = candidates(harness, prompt, 3)
        for _ in range(steps):
            harness.step()
        harness.engine.handle(Cancel(request_id=requests[victim]))
        harness.run()
        for i, request in enumerate(requests):
            if i != victim:
                assert harness.ids(request) == expected(oracle, prompt)
        harness.engine.scheduler.forget("a")
        harness.engine.scheduler.check()


def test_any_candidate_can_be_gone_on_with(make_engine: HarnessFactory, oracle: Oracle) -> None:
    harness = make_engine()
    prompt = tokens(100, 62)
    noise: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_p": 1.0}
    answers = [harness.ids(r) for r in _run(harness, candidates(harness, prompt, 3, **noise))]
    for answer in answers:
        history = prompt + answer
        request, more = ask(harness, history, tokens(6, 63), computed=len(history) - 1)
        assert more == expected(oracle, history + tokens(6, 63))
        assert harness.done(request).stats.resident_tokens == len(history) - 1


def test_candidates_of_a_chat_on_disk_restore_it_once(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path)
    first = tokens(200, 64)
    _, answer = ask(harness, [], first)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    history, new = first + answer, tokens(9, 65)
    requests = [
        harness.submit(
            new,
            prefix=SYSTEM,
            scope="s",
            candidate=i,
            history=history,
            computed=len(history) - 1,
            max_tokens=MAX_TOKENS,
        )
        for i in range(3)
    ]
    harness.run()
    assert [harness.ids(r) for r in requests] == [expected(oracle, history + new)] * 3
    stats = [harness.done(r).stats for r in requests]
    assert [s.restored_tokens for s in stats] == [len(history) - 1, 0, 0]
    assert [s.resident_tokens for s in stats[1:]] == [len(history + new) - 1] * 2
    assert [s.recomputed_tokens for s in stats] == [0, 0, 0]


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hidden", "kv", "recompute"])
def test_candidates_and_branches_under_pressure(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, method: str
) -> None:
    """A pool for hardly more than one of them: unused branches go, requests are preempted."""
    page = 3 * 2 * 64 * 2 * 64 * 4
    harness = make_engine(
        disk=tmp_path, checkpoint_method=method, kv_memory_bytes=11 * page, max_context=500
    )
    first = tokens(100, 70)
    for i, at in enumerate((100, 30, 70, 90)):
        prompt = first[:at] + tokens(40, 71 + i)
        requests = [
            harness.submit(prompt, prefix=SYSTEM, scope="s", candidate=k, max_tokens=70)
            for k in range(4)
        ]
        harness.run()
        answer = expected(oracle, prompt, 70)
        assert [harness.ids(request) for request in requests] == [answer] * 4
    assert harness.engine.stats().preemptions > 0
    while harness.engine.scheduler.resident.evict_one():
        harness.engine.scheduler.check()
    assert harness.engine.stats().pages_free == 11


# -- at random ---------------------------------------------------------------------------------

Step = tuple[int, int, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the chat
        st.integers(0, 3),  # the prefix
        st.integers(0, 400),  # where it leaves what it had
        st.sampled_from([1, 2, 30, 64, 65, 130]),  # new tokens
        st.integers(1, 3),  # candidates
    ),
    min_size=2,
    max_size=7,
)
CHAINS = [[], SYSTEM, SYSTEM + POEM, SYSTEM[:70] + BOOK]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    model = make_tiny_model(tmp_path_factory.mktemp("small"), num_kv_heads=4, seed=5)
    return model, Oracle(model)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    steps=STEPS,
    sharing=st.sampled_from(SHARING),
    method=st.sampled_from(["auto", "hidden"]),
    restart=st.integers(0, 6),
    pages=st.sampled_from([26, 200]),
)
def test_any_history_of_branches(
    small: tuple[Path, Oracle],
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[Step],
    sharing: str,
    method: str,
    restart: int,
    pages: int,
) -> None:
    model, oracle = small
    factory = HarnessFactory(model)
    disk = tmp_path_factory.mktemp("disk")
    page = 3 * 2 * 64 * 4 * 64 * 4
    config: dict[str, Any] = {
        "disk": disk,
        "checkpoint_method": method,
        "kv_memory_bytes": pages * page,
        "max_context": 1500,
        "prefill_chunk": 96,
    }
    harness = gated(factory(**config), sharing)
    said: dict[int, list[int]] = {}
    for number, (chat, chain, leave, count, copies) in enumerate(steps):
        if number == restart:
            factory.close(harness)
            harness = gated(factory(**config), sharing)
        history = said.get(chat, [])[:leave]
        new = tokens(count, 1000 * number + count)
        requests = [
            harness.submit(
                new,
                chat=f"{chat}-{chain}",
                prefix=CHAINS[chain],
                scope="s",
                history=history,
                candidate=i,
                max_tokens=4,
            )
            for i in range(copies)
        ]
        harness.run()
        ids, gap = oracle.choices(CHAINS[chain] + history + new, 4)
        answers = [harness.ids(request) for request in requests]
        assert answers == [answers[0]] * copies
        if gap > 5e-3:
            assert answers[0] == ids
        said[chat] = history + new + answers[0]
    factory.close(harness)

"""Drafts never change an answer, and are made only where they pay.

What is drafted comes from the test where it has to be right or wrong at a given place; the
reference is transformers' own generation, or the same engine without drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import speculation
from engine.messages import Delta, SamplingParams, Submit
from engine.request import Request
from engine.speculation import (
    FORGET,
    MAX_CHATS,
    MAX_DRAFT,
    Draft,
    PromptLookup,
    Speculating,
    Speculation,
)
from tests.engine.harness import Harness, HarnessFactory, Oracle
from tests.engine.harness import random_ids as tokens

PREFIX = tokens(100, 1)
LENGTH = 90  # of an answer: more than a page


def drafts_of(answers: dict[int, list[int]], wrong: Callable[[], bool]) -> Any:
    """Drafts of known answers, by the length of their prompts; where `wrong`, another token."""

    def draft(lookup: PromptLookup, limit: int, worth: float) -> Draft:
        begun = next(start for start in sorted(answers, reverse=True) if start <= len(lookup))
        done = len(lookup) - begun
        ids = answers[begun][done : done + limit]
        return [(token ^ 1 if wrong() else token, 1.0) for token in ids]

    return draft


# -- the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0], ids=["right", "some wrong", "wrong"])
def test_greedy_answers_are_those_of_transformers(
    make_engine: HarnessFactory, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Several chats, over pages' ends, whatever is right and wrong in a draft."""
    prompts = [tokens(50 + 300 * i, 20 + i) for i in range(4)]
    answers = [oracle.greedy(PREFIX + prompt, LENGTH) for prompt in prompts]
    rng = random.Random(5)
    known = {len(PREFIX + prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
    monkeypatch.setattr(PromptLookup, "draft", drafts_of(known, lambda: rng.random() < share))
    harness = make_engine(speculation="always")
    requests = [
        harness.submit(prompt, chat=f"c{i}", prefix=PREFIX, max_tokens=LENGTH)
        for i, prompt in enumerate(prompts)
    ]
    harness.run()
    assert [harness.ids(request) for request in requests] == answers
    stats = harness.engine.stats()
    assert stats.tokens_drafted > 100
    if share == 0.0:
        assert stats.tokens_accepted == stats.tokens_drafted
        assert stats.steps < LENGTH / 3
    elif share == 1.0:
        assert stats.tokens_accepted == 0
    else:
        assert 0 < stats.tokens_accepted < stats.tokens_drafted


@pytest.mark.parametrize("method", ["hidden", "kv"])
def test_what_was_saved_is_what_was_said(
    make_engine: HarnessFactory,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
) -> None:
    """Rows of wrong drafts were staged; they must not come back after a restart."""
    prompt, rng = tokens(70, 3), random.Random(6)
    answer = oracle.greedy(PREFIX + prompt, LENGTH)
    history = prompt + answer
    follow = tokens(9, 4)
    expected = oracle.greedy(PREFIX + history + follow, 12)
    draft = drafts_of({len(PREFIX + prompt): answer}, lambda: rng.random() < 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(PromptLookup, "draft", draft)
        harness = make_engine(disk=tmp_path, checkpoint_method=method, speculation="always")
        first = harness.submit(prompt, prefix=PREFIX, max_tokens=LENGTH)
        harness.run()
        assert harness.ids(first) == answer
        assert harness.engine.stats().tokens_accepted < harness.engine.stats().tokens_drafted
        make_engine.close(harness)
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    second = harness.submit(
        follow, prefix=PREFIX, history=history, computed=len(history) - 1, max_tokens=12
    )
    harness.run()
    assert harness.ids(second) == expected
    stats = harness.done(second).stats
    assert (stats.restored_tokens, stats.recomputed_tokens) == (len(history) - 1, 0)


def both(make_engine: HarnessFactory, use: Callable[[Harness], Any]) -> tuple[Any, Any]:
    """What comes out with drafts and without, of an engine of its own each."""
    with_drafts, without = make_engine(speculation="always"), make_engine()
    return use(with_drafts), use(without)


def repeating(seed: int) -> list[int]:
    """A prompt that says a passage again and stops in the midst of it."""
    passage = tokens(30, seed)
    return passage + tokens(5, seed + 1) + passage[:12]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 6},
        {"temperature": 0.0, "max_tokens": 1},
        {"temperature": 0.0, "max_tokens": 3},
    ],
    ids=["greedy", "sampled", "penalty", "one", "three"],
)
def test_the_lookup_itself_changes_nothing(
    make_engine: HarnessFactory, sampling: dict[str, Any]
) -> None:
    def use(harness: Harness) -> tuple[list[list[int]], int]:
        options = {"max_tokens": 60, **sampling}
        requests = [
            harness.submit(repeating(40 + i), chat=f"c{i}", prefix=PREFIX, **options)
            for i in range(5)
        ]
        harness.run()
        answers = [harness.ids(request) for request in requests]
        return answers, harness.engine.stats().tokens_decoded

    drafted, plain = both(make_engine, use)
    assert drafted == plain


def test_each_row_of_a_draft_has_the_noise_of_its_position(
    make_engine: HarnessFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(40, 8)

    def use(harness: Harness) -> list[int]:
        request = harness.submit(
            prompt, prefix=PREFIX, max_tokens=50, temperature=20.0, seed=3, stop=[]
        )
        harness.run()
        return harness.ids(request)

    plain = use(make_engine())
    rng = random.Random(2)
    draft = drafts_of({len(PREFIX + prompt): plain}, lambda: rng.random() < 0.1)
    monkeypatch.setattr(PromptLookup, "draft", draft)
    harness = make_engine(speculation="always")
    assert use(harness) == plain
    assert harness.engine.stats().tokens_accepted > 10


def test_a_stop_string_ends_an_answer_in_the_midst_of_a_draft(
    make_engine: HarnessFactory, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(40, 8)
    answer = oracle.greedy(PREFIX + prompt, 40)
    harness = make_engine(speculation="always")
    texts = [harness.engine.tokenizer.decode([token]) for token in answer]
    at = next(i for i in range(12, 40) if texts[i].isascii() and texts[i] not in texts[:i])
    monkeypatch.setattr(
        PromptLookup, "draft", drafts_of({len(PREFIX + prompt): answer}, lambda: False)
    )
    request = harness.submit(prompt, prefix=PREFIX, max_tokens=40, stop=[texts[at]])
    harness.run()
    assert harness.ids(request) == answer[: at + 1]
    assert harness.done(request).finish == "stop"
    follow = tokens(5, 9)  # the chat goes on from what was said, not from what was drafted
    history = prompt + answer[: at + 1]
    second = harness.submit(follow, prefix=PREFIX, history=history, computed=len(history) - 1)
    harness.run()
    assert harness.ids(second) == oracle.greedy(PREFIX + history + follow, 12)
    assert harness.done(second).stats.resident_tokens == len(history) - 1


def test_an_answer_may_fill_the_context(make_engine: HarnessFactory) -> None:
    def use(harness: Harness) -> list[int]:
        request = harness.submit(repeating(60), max_tokens=500)
        harness.run()
        return harness.ids(request)

    drafted, plain = (
        use(make_engine(speculation=choice, max_context=110)) for choice in ("always", "never")
    )
    assert drafted == plain
    assert len(plain) == 110 - len(repeating(60))


def test_logprobs_are_those_of_each_token(
    make_engine: HarnessFactory, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(40, 8)
    answer = oracle.greedy(PREFIX + prompt, 12)
    wrong = iter([False, False, True] * 40)
    draft = drafts_of({len(PREFIX + prompt): answer}, lambda: next(wrong))

    def use(harness: Harness) -> list[tuple[int, float]]:
        harness.engine.handle(
            Submit(
                request_id="r",
                chat_id="a",
                prefix_ids=PREFIX,
                history_ids=[],
                history_computed=0,
                new_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=12),
                top_logprobs=0,
            )
        )
        harness.run()
        said = [event for event in harness.events if isinstance(event, Delta)]
        return [(e.token_ids[0], e.logprobs[0].logprob) for e in said if e.logprobs]

    monkeypatch.setattr(PromptLookup, "draft", draft)
    drafted, plain = both(make_engine, use)
    assert [token for token, _ in drafted] == answer
    assert [score for _, score in drafted] == pytest.approx([s for _, s in plain], abs=1e-4)


# -- the lookup ------------------------------------------------------------------------------------


def foreseen(lookup: PromptLookup, limit: int, worth: float) -> list[int]:
    return [token for token, _ in lookup.draft(limit, worth)]


def test_what_followed_last_time_is_drafted() -> None:
    assert foreseen(PromptLookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]), 4, 0.0) == [4, 5, 6, 9]
    latest = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3]
    assert foreseen(PromptLookup(latest), 1, 0.0) == [5]
    assert foreseen(PromptLookup([1, 2, 3, 4, 5]), 4, 0.0) == []
    assert foreseen(PromptLookup([7, 2, 3, 4, 1, 2, 3]), 4, 0.0) == []  # two tokens are not enough
    assert foreseen(PromptLookup([1, 2]), 4, 0.0) == []
    assert foreseen(PromptLookup([]), 4, 0.0) == []


def test_a_passage_may_reach_into_its_own_draft() -> None:
    assert foreseen(PromptLookup([5, 5, 5, 5]), 5, 0.0) == [5] * 5
    assert foreseen(PromptLookup([1, 2, 3, 1, 2, 3]), 8, 0.0) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_passage_is_followed_and_left() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    assert foreseen(lookup, 3, 0.0) == [4, 5, 6]
    for token in (4, 5, 6):
        lookup.push(token)
    assert foreseen(lookup, 3, 0.0) == [7, 8, 9]
    lookup.push(99)
    assert foreseen(lookup, 3, 0.0) == []
    for token in range(200):  # grows
        lookup.push(1000 + token)
    for token in (1010, 1011, 1012):
        lookup.push(token)
    assert foreseen(lookup, 2, 0.0) == [1013, 1014]


def test_drafts_get_longer_as_they_come_right_and_stop_when_they_do_not() -> None:
    good = PromptLookup([*range(100), 0, 1, 2])
    short = len(good.draft(MAX_DRAFT, 0.4))
    for token in range(3, 40):
        good.push(token)
    assert short < len(good.draft(MAX_DRAFT, 0.4)) == MAX_DRAFT
    bad = PromptLookup([0, 1, 2, 3])
    for i in range(20):
        for token in (0, 1, 2):
            bad.push(token)
        bad.draft(MAX_DRAFT, 0.0)
        bad.push(500 + i)
    for token in (0, 1, 2):
        bad.push(token)
    assert foreseen(bad, MAX_DRAFT, 0.2) == []


# -- where it pays ---------------------------------------------------------------------------------


@pytest.fixture
def chats(make_engine: HarnessFactory) -> list[Request]:
    """Requests that decode and repeat themselves."""
    harness = make_engine()
    for i in range(MAX_CHATS + 1):
        harness.submit([7, 8, 9] * 10, chat=f"c{i}", max_tokens=50)
    while sum(len(request.output) for request in harness.engine.scheduler.running) < MAX_CHATS + 1:
        harness.step()
    running = list(harness.engine.scheduler.running)
    for request in running:  # as if the model had gone on with it
        request.output[:] = [7]
        request.sequence.ids[-1] = 7
    return running


def test_drafts_wait_until_a_step_was_measured(chats: list[Request]) -> None:
    auto = Speculation("auto", 4096)
    assert auto.drafts(chats[:1]) == {}
    auto.ran(1, 0, 0.010)
    assert auto.drafts(chats[:1])
    assert Speculation("always", 4096).drafts(chats[:1])
    assert Speculation("never", 4096).drafts(chats[:1]) == {}


def test_drafts_are_made_where_a_row_is_cheap(chats: list[Request]) -> None:
    cheap, dear = Speculation("auto", 4096), Speculation("auto", 4096)
    for auto, row_s in ((cheap, 0.0001), (dear, 0.008)):
        auto.ran(4, 0, 0.010)
        auto.ran(4, 2, 0.010 + 2 * row_s)
    assert len(cheap.drafts(chats[:4])) == 4
    assert dear.drafts(chats[:4]) == {}


def test_one_slow_step_does_not_end_it(chats: list[Request]) -> None:
    auto = Speculation("auto", 4096)
    auto.ran(1, 0, 0.010)
    for seconds in (0.012, 0.013, 0.500, 0.012):
        auto.ran(1, 4, seconds)
    assert auto.drafts(chats[:1])


def test_what_was_too_dear_is_tried_again_some_day(chats: list[Request]) -> None:
    auto = Speculation("auto", 4096)
    auto.ran(1, 0, 0.010)
    auto.ran(1, 1, 0.030)
    assert auto.drafts(chats[:1]) == {}
    for _ in range(FORGET):
        auto.ran(1, 0, 0.010)
    assert auto.drafts(chats[:1])


def test_a_chat_without_a_draft_is_hardly_slowed_down(chats: list[Request]) -> None:
    """Rows of a tenth of a step: one of them has room, while all may pay as they like."""
    chats[3].sequence.ids[-1] = chats[3].output[-1] = 0  # said for the first time
    cases: list[tuple[Speculating, int]] = [("auto", 4), ("always", 3 * MAX_DRAFT)]
    for choice, expected in cases:
        rows = Speculation(choice, 4096)
        rows.ran(4, 0, 0.0100)
        rows.ran(4, 4, 0.0110)
        drafts = rows.drafts(chats[:4])
        assert chats[3] not in drafts
        assert 0 < sum(map(len, drafts.values())) <= expected
    everyone = Speculation("auto", 4096)
    everyone.ran(3, 0, 0.0100)
    everyone.ran(3, 4, 0.0110)
    assert sum(map(len, everyone.drafts(chats[:3]).values())) > 4


def test_many_chats_draft_nothing(chats: list[Request]) -> None:
    auto = Speculation("auto", 4096)
    auto.ran(MAX_CHATS + 1, 0, 0.010)
    auto.ran(MAX_CHATS + 1, 1, 0.010)
    assert auto.drafts(chats) == {}
    assert Speculation("always", 4096).drafts(chats)


def test_a_draft_ends_with_page_answer_and_context(chats: list[Request]) -> None:
    request = chats[0]
    always = Speculation("always", 4096)
    (draft,) = always.drafts([request]).values()
    assert len(draft) == speculation.MAX_DRAFT
    request.sequence.ids.extend([7] * (60 - len(request.sequence.ids)))
    (draft,) = always.drafts([request]).values()
    assert len(draft) == 3
    (draft,) = Speculation("always", 63).drafts([request]).values()
    assert len(draft) == 2
    request.output.extend([7] * 47)  # 48 of 50
    (draft,) = always.drafts([request]).values()
    assert len(draft) == 1

"""Small parts of the web application by themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import problem_of
from app.faults import InvalidField
from app.latency_charts import turn_charts
from app.message_text import TITLE_CHARS, clean_text, clean_title, title_of
from app.submissions import Submissions
from app.timeline import latency_line, timelines_of
from app.turn_records import history_of, outcome_of
from engine.errors import QueueFull
from engine.messages import Failed, FailureKind
from sessions.latency_records import TurnRecord
from sessions.records import Latency, Message
from tests.app.fake_engine import stats

NOW = datetime(2026, 3, 1, 10, 2, tzinfo=UTC)


def latency(**changes: object) -> Latency:
    return Latency(**msgspec.structs.asdict(stats(**changes)), server_ttft_ms=96.4)


def record(**changes: object) -> TurnRecord:
    return TurnRecord(
        turn_id="t",
        chat_id="c",
        message_id="m",
        created_at=NOW,
        ended_at=NOW,
        outcome="complete",
        first_token_ms=96.4,
        latency=latency(**changes),
    )


def message(role: str, ids: list[int], finish: str | None = None) -> Message:
    return Message(
        id="m",
        chat_id="c",
        parent_id=None,
        role=role,  # type: ignore[arg-type]
        text="",
        token_ids=ids,
        status="interrupted" if finish == "none" else "complete",
        finish_reason=None if finish == "none" else finish,
        error=None,
        created_at=NOW,
        completed_at=None,
    )


@pytest.mark.parametrize(
    ("answer", "computed"),
    [
        (message("assistant", [3, 4], "eos"), 4),
        (message("assistant", [3, 4], "length"), 3),
        (message("assistant", [3, 4], "stop"), 3),
        (message("assistant", [3, 4], "none"), 3),
        (message("assistant", [], "eos"), 2),
        (message("assistant", [], None), 0),  # died before the question was read
        (message("assistant", [], "cancelled"), 0),
    ],
)
def test_only_tokens_that_were_run_count_as_computed(answer: Message, computed: int) -> None:
    path = [message("user", [1, 2]), answer]
    assert history_of(path) == ([1, 2, *answer.token_ids], computed)


def test_a_cut_answer_in_the_middle_is_history_like_any_other() -> None:
    path = [
        message("user", [1]),
        message("assistant", [2, 3], None),
        message("user", [4]),
        message("assistant", [5], "eos"),
    ]
    assert history_of(path) == ([1, 2, 3, 4, 5], 5)
    assert history_of([]) == ([], 0)


def test_what_was_carried_over_was_never_run() -> None:
    carried = [message("user", [1, 2]), message("assistant", [3])]
    assert history_of(carried) == ([1, 2, 3], 0)
    made = [message("user", [4]), message("assistant", [5], "length")]
    assert history_of([*carried, *made]) == ([1, 2, 3, 4, 5], 4)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_text_is_kept_but_for_crlf(text: str) -> None:
    if not text.strip():
        with pytest.raises(InvalidField, match="empty"):
            clean_text(text, 1000)
    else:
        assert clean_text(text, 1000) == text.replace("\r\n", "\n")
        assert 1 <= len(title_of(text)) <= TITLE_CHARS + 1
        assert "\n" not in title_of(text)


def test_what_cannot_be_stored_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidField, match=r"U\+D83D at character 3"):
        clean_text("ab\ud83d", 1000)
    with pytest.raises(InvalidField, match=r"U\+0000 at character 2"):
        clean_title("a\0b")
    with pytest.raises(InvalidField, match="The title is empty"):
        clean_title(" \n ")
    with pytest.raises(InvalidField, match="The title is empty"):
        clean_title("\u200b\u202e\ufeff")
    with pytest.raises(InvalidField, match="121 characters"):
        clean_title("x" * 121)
    assert clean_title(" a \n b ") == "a b"


def test_the_limit_counts_what_is_stored() -> None:
    assert clean_text("a\r\nb", 3) == "a\nb"
    with pytest.raises(InvalidField, match=r"has 4 characters; up to 3 can be sent"):
        clean_text("a\nbc", 3)


def test_a_title_ends_at_a_word() -> None:
    title = title_of("word " * 30)
    assert title == ("word " * 12).strip() + "…"
    assert title_of("x" * 200) == "x" * TITLE_CHARS + "…"
    assert title_of("\u200b \u200b") == "Untitled"
    assert title_of("\u202b日本") == "\u202b日本"


@pytest.mark.parametrize(
    ("kind", "reason", "status", "says"),
    [
        ("queue_full", "4 wait", "failed", "The server was too busy to take this question."),
        (
            "context_overflow",
            "the chat has 9 tokens; the context holds 8",
            "failed",
            "The model cannot take this chat: the chat has 9 tokens; the context holds 8.",
        ),
        ("internal", "A fault.", "failed", "A fault."),
        ("engine_died", "It died.", "interrupted", "It died."),
    ],
)
def test_a_failed_turn_is_told_in_a_sentence(
    kind: FailureKind, reason: str, status: str, says: str
) -> None:
    outcome = outcome_of(Failed(request_id="r", kind=kind, reason=reason), None)
    assert (outcome.status, outcome.error) == (status, says)


@pytest.mark.parametrize(("wait_s", "says"), [(1, "in a second;"), (3, "in 3 seconds;")])
def test_a_busy_server_says_when_to_try_again(wait_s: int, says: str) -> None:
    assert says in problem_of(QueueFull(limit=4, retry_after_s=wait_s)).hint


def test_the_line_under_an_answer() -> None:
    assert latency_line(latency(resident_tokens=0, prefix_tokens=0)) == (
        "restored 1,204 tokens in 38 ms, first token 96 ms, 4.5 tokens/s"
    )
    fresh = latency(
        restored_tokens=0, resident_tokens=0, recomputed_tokens=7, prefix_tokens=0, tokens_out=1
    )
    assert latency_line(fresh) == "recomputed 7 tokens, first token 96 ms"
    assert latency_line(replace(fresh, recomputed_tokens=1)).startswith("recomputed 1 token,")
    unknown = replace(fresh, server_ttft_ms=None)
    assert latency_line(unknown) == "recomputed 7 tokens"
    never_left_the_queue = replace(unknown, prefill_ms=0.0)
    assert [len(timelines_of([one])) for one in (unknown, never_left_the_queue)] == [1, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "for steps of other chats"),
        ({"prefix_computed_tokens": 708}, "for the assistant's 708 tokens to be read"),
        ({"prefix_restored_tokens": 1}, "for the assistant's 1 token to be restored"),
    ],
)
def test_what_a_first_token_waited_for_besides_is_told(changes: dict[str, int], said: str) -> None:
    times = {"queue_ms": 2.0, "restore_ms": 38.0, "prefill_ms": 60.0, "total_ms": 1200.0}
    turn = latency(**times, ttft_ms=600.0, **changes)
    [timeline] = timelines_of([turn])
    kinds = [step.kind for step in timeline.steps]
    assert kinds[:4] == ["queue", "restore", "waited", "read"]
    step = timeline.steps[2]
    assert (step.time, step.detail) == ("500 ms", said)
    spans = {span.kind: (span.start, span.start + span.length) for span in timeline.spans}
    assert spans["waited"] == (33, 450)  # of 1000; the reading follows, up to the first token
    assert spans["read"] == (450, 500)
    [at_once] = timelines_of([latency(**times, ttft_ms=100.0)])
    assert "waited" not in [step.kind for step in at_once.steps]
    assert "waited" not in [span.kind for span in at_once.spans]


def test_a_restore_is_shown_beside_what_it_was_predicted_to_take() -> None:
    def detail(**changes: object) -> str:
        [timeline] = timelines_of([latency(**changes)])
        return next(step.detail for step in timeline.steps if step.kind == "restore")

    assert detail() == (
        "1,204 tokens, 4 KiB; disk 20 ms, computing 15 ms; predicted 36 ms, took 38 ms; "
        "layers: 3 recompute + 1 hidden + 26 kv"
    )
    assert detail(restore_predicted_ms=None, restore_plan="kv") == (
        "1,204 tokens, 4 KiB; disk 20 ms, computing 15 ms; layers: kv"
    )


def test_the_line_tells_a_shared_prompt_from_one_that_this_turn_brought() -> None:
    def line(**changes: object) -> str:
        given = {
            "restored_tokens": 0,
            "resident_tokens": 0,
            "prefix_tokens": 1081,
            "tokens_out": 1,
            **changes,
        }
        return latency_line(latency(**given)).removesuffix(", first token 96 ms")

    assert line() == "1,081 tokens shared with other chats"
    assert line(prefix_computed_tokens=1081) == "read the assistant's 1,081 tokens"
    assert line(prefix_restored_tokens=1081) == "restored the assistant's 1,081 tokens"
    assert line(prefix_restored_tokens=1024, prefix_computed_tokens=57) == (
        "restored the assistant's 1,024 tokens, read the assistant's 57 tokens"
    )


def test_charts_say_what_their_tables_say_and_unknown_is_no_zero() -> None:
    turns = [record(itl_p50_ms=None, restored_tokens=0), record()]
    charts = {chart.id: chart for chart in turn_charts(turns, first=7)}
    assert [x for x, _ in charts["tokens"].rows()] == ["7", "8"]
    median, _ = charts["between-tokens"].series
    assert median.values == [None, 20.0]
    restore = next(one for one in charts["parts"].series if one.label == "restore")
    assert restore.values == [None, 38.2]
    first = {one.label: one.values for one in charts["first-token"].series}
    assert (first["in memory"], first["restored"]) == ([96.4, None], [None, 96.4])
    assert turn_charts([], first=1)[0].rows() == []


@pytest.mark.anyio
async def test_a_form_works_once_but_may_be_tried_again_after_a_failure() -> None:
    submissions = Submissions()
    calls = 0

    async def work() -> str:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        if calls == 1:
            raise ValueError("not yet")
        return f"chat {calls}"

    tries = await asyncio.gather(
        submissions.once("u", "s", work), submissions.once("u", "s", work), return_exceptions=True
    )
    assert [type(one) for one in tries] == [ValueError, ValueError]
    assert calls == 1
    again = await asyncio.gather(*(submissions.once("u", "s", work) for _ in range(3)))
    assert again == ["chat 2"] * 3
    assert await submissions.once("other", "s", work) == "chat 3"
    assert await submissions.once("u", "", work) == "chat 4"

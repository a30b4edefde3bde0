"""Search finds any run of characters in titles and messages, of the user's own chats only."""

from __future__ import annotations

import random
import sqlite3
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from sessions.folding import fold
from sessions.history_records import SearchHit
from sessions.queries import search
from sessions.records import Progress
from sessions.repository import Repository

if TYPE_CHECKING:
    from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio

TEXTS = [
    "C++ and C# are not the same as C",
    'He said "hello-world" and left',
    "AND OR NOT NEAR( are words here, NEAR(a b) too",
    "5 * 3 = 15; a^b; col:umn; {x} -y +z",
    "東京都の天気は晴れです。大阪も晴れ",
    "한국어 문장을 찾는다",
    "Ein Café in Zürich, ÜBER den Dächern",
    "ends with the cat 猫",
    "100% sure_thing \\ back",
    "emoji 🎉🎊 party",
]


async def _texts(repository: Repository, user_id: str, *terms: str) -> set[str]:
    hits = await repository.search_messages(user_id, terms)
    assert [hit.place for hit in hits] == sorted((hit.place for hit in hits), reverse=True)
    return {hit.text for hit in hits if hit.text is not None}


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (["C++"], [0]),
        (["c++"], [0]),
        (["C#"], [0]),
        (["C"], [0, 3, 6, 7, 8]),
        (['"'], [1]),
        (['"hello'], [1]),
        (["hello-world"], [1]),
        (["AND"], [0, 1, 2]),
        (["NEAR("], [2]),
        (["near(a"], [2]),
        (["*"], [3]),
        (["a^b;"], [3]),
        (["col:umn"], [3]),
        (["{x}"], [3]),
        (["-y"], [3]),
        (["東京"], [4]),
        (["京都の"], [4]),
        (["晴"], [4]),
        (["晴れ"], [4]),
        (["天気は晴れです"], [4]),
        (["문장"], [5]),
        (["über"], [6]),
        (["ZÜRICH"], [6]),
        (["猫"], [7]),
        (["cat", "猫"], [7]),
        (["100%"], [8]),
        (["sure_thing"], [8]),
        (["sureXthing"], []),
        (["\\"], [8]),
        (["🎊"], [9]),
        (["🎉🎊"], [9]),
        (["the", "cat"], [7]),
        (["the", "C#"], [0]),
        (["the", "zz"], []),
        (["nowhere"], []),
    ],
)
async def test_terms_are_plain_text(
    repository: Repository, chats: Chats, terms: list[str], expected: list[int]
) -> None:
    for text in TEXTS:
        await chats.answer(await chats.start("question"), text)
    assert await _texts(repository, chats.user.id, *terms) == {TEXTS[one] for one in expected}


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text('abAB"*(-é東京 \n', min_size=1, max_size=12), min_size=1, max_size=5),
    term=st.text('abAB"*(-é東京', min_size=1, max_size=4),
)
def test_a_hit_is_what_holds_the_term(texts: list[str], term: str) -> None:
    """Against Python's own `in`, through the same tables and expressions as the server's."""
    db = sqlite3.connect(":memory:")
    db.execute("CREATE VIRTUAL TABLE t USING fts5(text, content='', tokenize='trigram')")
    db.execute("CREATE VIRTUAL TABLE v USING fts5vocab(t, row)")
    for number, text in enumerate(texts):
        db.execute("INSERT INTO t (rowid, text) VALUES (?, ? || '  ')", (number + 1, text))
    if len(term) >= search.TRIGRAM:
        expression = search._quoted(term)
    else:
        low = fold(term)
        rows = db.execute(
            "SELECT term FROM v WHERE term >= ? AND term < ?", (low, low + "\U0010ffff")
        )
        expression = " OR ".join(search._quoted(row[0]) for row in rows)
    found = set()
    if expression:
        found = {row[0] for row in db.execute("SELECT rowid FROM t WHERE t MATCH ?", (expression,))}
    db.close()
    expected = {number + 1 for number, text in enumerate(texts) if term.lower() in text.lower()}
    assert found == expected


async def test_titles_and_messages_of_others_are_not_found(
    repository: Repository, chats: Chats
) -> None:
    stranger = await repository.create_user("stranger")
    ours = await chats.start("needle ours")
    await chats.start("needle theirs", user=stranger)
    assert await _texts(repository, chats.user.id, "needle") == {"needle ours"}
    assert await _texts(repository, stranger.id, "needle") == {"needle theirs"}
    [title] = await repository.search_titles(chats.user.id, ["NEEDLE", "title"])
    assert (title.chat_id, title.chat_title) == (ours.chat_id, "title of needle ours")
    assert title.message_id is None
    assert await repository.search_titles(chats.user.id, ["theirs"]) == []


async def test_titles_follow_renaming_latest_first(repository: Repository, chats: Chats) -> None:
    user_id = chats.user.id
    first, second = await chats.start("alpha"), await chats.start("alpha beta")

    async def found(*terms: str) -> list[str]:
        return [hit.chat_id for hit in await repository.search_titles(user_id, terms)]

    assert await found("alpha") == [second.chat_id, first.chat_id]
    await chats.answer(first)
    assert await found("al") == [first.chat_id, second.chat_id]
    await repository.rename_chat(user_id, first.chat_id, "gamma")
    assert await found("alpha") == [second.chat_id]
    assert await found("gamma") == await found("mm") == [first.chat_id]


async def test_an_answer_is_found_when_it_has_ended(repository: Repository, chats: Chats) -> None:
    turn = await chats.start("question")
    progress = Progress(message_id=turn.message_id, text="partial secret", token_ids=[1])
    await repository.save_progress([progress])
    assert await _texts(repository, chats.user.id, "secret") == set()
    await chats.answer(turn, "the whole secret")
    assert await _texts(repository, chats.user.id, "secret") == {"the whole secret"}
    assert await _texts(repository, chats.user.id, "partial") == set()
    lost = await chats.ask(turn.chat_id, turn.message_id, "again")
    cut = Progress(message_id=lost.message_id, text="cut off", token_ids=[1])
    await repository.save_progress([cut])
    await repository.interrupt_running()
    assert await _texts(repository, chats.user.id, "cut off") == {"cut off"}


async def test_other_branches_are_found_and_said(repository: Repository, chats: Chats) -> None:
    turn = await chats.start("needle one")
    await chats.answer(turn, "needle answer")
    edited = await chats.ask(turn.chat_id, None, "needle two")
    await chats.answer(edited, "other words")
    hits = await repository.search_messages(chats.user.id, ["needle"])
    assert [(hit.text, hit.active) for hit in hits] == [
        ("needle two", True),
        ("needle answer", False),
        ("needle one", False),
    ]
    await repository.select_branch(turn.chat_id, turn.message_id)
    hits = await repository.search_messages(chats.user.id, ["needle"])
    assert [hit.active for hit in hits] == [False, True, True]


async def test_hits_come_in_pages(repository: Repository, chats: Chats) -> None:
    for number in range(7):
        await chats.start(f"needle {number}")
    found: list[SearchHit] = []
    before = None
    while page := await repository.search_messages(
        chats.user.id, ["needle"], limit=3, before=before
    ):
        found += page
        before = page[-1].place
    assert [hit.text for hit in found] == [f"needle {number}" for number in range(6, -1, -1)]


async def test_a_letter_with_too_many_trigrams_is_looked_for_in_the_texts(
    repository: Repository, chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    texts = ["".join(rng.choices("abcdefXYZ ", k=30)) for _ in range(12)]
    for text in texts:
        await chats.answer(await chats.start("ööö"), text)
    terms_of = [["a"], ["X"], ["x"], ["ab"], ["a", "x"], ["a", texts[3][:5].strip() or "a"]]
    usual = [await _texts(repository, chats.user.id, *terms) for terms in terms_of]
    assert any(usual)
    monkeypatch.setattr(search, "MAX_EXPANDED", 0)
    for terms, expected in zip(terms_of, usual, strict=True):
        assert await _texts(repository, chats.user.id, *terms) == expected
    assert len(await repository.search_titles(chats.user.id, ["ö"])) == 12


async def test_the_search_begins_with_the_index(repository: Repository, chats: Chats) -> None:
    await chats.start("needle")
    statements = []

    @event.listens_for(repository._database._reader_engine.sync_engine, "before_cursor_execute")
    def note(_: object, __: object, statement: str, parameters: object, *___: object) -> None:
        statements.append((statement, parameters))

    assert await repository.search_messages(chats.user.id, ["needle"])
    statement, parameters = next(one for one in statements if "MATCH" in one[0])
    async with repository._database.read() as db:
        plan = [
            row.detail
            for row in await db.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)  # type: ignore[arg-type]
        ]
    assert plan[0].startswith("SCAN found VIRTUAL TABLE")
    assert all(step.startswith("SEARCH") for step in plan[1:]), plan
    assert not any("TEMP B-TREE" in step for step in plan), "the index gives the order"

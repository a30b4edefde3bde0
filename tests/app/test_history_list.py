"""The list of chats over HTTP: pages, search, pin, rename, delete with a way back, purge."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app import chat_list
from app.history import purger as purger_module
from app.history import search
from app.settings import Settings
from sessions import migrate
from sessions.records import ChatCursor
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import HTMX, Browser, Server, field, serving, text_of

pytestmark = pytest.mark.anyio

HIDDEN = 404


@pytest.fixture
def fake_engine() -> FakeEngine:
    return FakeEngine(auto="An answer about *needles*.")


@pytest.fixture
async def stranger(server: Server) -> AsyncIterator[Browser]:
    async with server.browser() as stranger:
        await stranger.new_chat("A stranger's needle")
        yield stranger


async def settled(server: Server) -> None:
    """Every turn has been stored."""
    for _ in range(500):
        if not server.app.state.services.hub.running():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a turn does not end")


def titles(page: str) -> list[str]:
    links = re.findall(r'<a class="chat-list__link".*?</a>', page, re.DOTALL)
    return [text_of(link).strip() for link in links]


def hrefs(page: str, css_class: str) -> list[str]:
    return re.findall(rf'class="{css_class}"[^>]* href="([^"]+)"', page)


# Search


async def test_search_shows_titles_then_messages_with_the_match_marked(
    browser: Browser, server: Server, stranger: Browser
) -> None:
    chat_id = await browser.new_chat("Where is <the> needle & the hay?")
    await settled(server)
    page = (await browser.get("/search", params={"q": "needle"})).text
    found = page[page.index('class="history"') :]
    assert "Where is &lt;the&gt; <mark>needle</mark> &amp; the hay?" in found
    assert "An answer about *<mark>needle</mark>s*." in found
    assert found.index("Titles") < found.index("Messages")
    assert "stranger" not in page
    links = hrefs(found, "found__snippet")
    assert len(links) == 2
    assert all(re.fullmatch(rf"/chats/{chat_id}#message-[0-9a-f]{{32}}", one) for one in links)
    assert 'value="needle"' in page, "the words stay in their field"
    theirs = (await stranger.get("/search", params={"q": "needle"})).text
    assert "stranger" in theirs
    assert "hay" not in theirs


async def test_no_query_is_a_fault(browser: Browser) -> None:
    await browser.new_chat("something else")
    for query in ("", "  ", "\0", '"', "NEAR(", "' OR 1=1 --", "z" * 5000, "&amp;"):
        response = await browser.get("/search", params={"q": query, "before": "-1"})
        assert response.status_code == 200, query
        if query.strip(" \0"):
            assert "Nothing found" in response.text, query
        else:
            assert "Looks through the titles" in response.text


async def test_a_search_fragment_stands_above_the_list(browser: Browser, server: Server) -> None:
    await browser.new_chat("needle")
    await settled(server)
    headers = {"HX-Request": "true", "HX-Request-Type": "partial"}
    response = await browser.http.get("/search", params={"q": "needle"}, headers=headers)
    assert "<html" not in response.text
    assert "<mark>needle</mark>" in response.text
    cleared = await browser.http.get("/search", params={"q": " "}, headers=headers)
    assert cleared.text == "", "nothing stands above the list then"


async def test_search_without_a_user_finds_nothing(server: Server) -> None:
    async with server.browser() as browser:
        response = await browser.get("/search", params={"q": "needle"})
        assert "Nothing found" in response.text
        assert server.app.state.services is not None


async def test_another_branch_is_reached_by_a_form(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("question")
    await settled(server)
    repository = server.app.state.repository
    path = await repository.path(chat_id)
    server.engine.auto = "other words"
    assert (await browser.post(f"/messages/{path[1].id}/again")).status_code == 303
    await settled(server)
    page = (await browser.get("/search", params={"q": "needles"})).text
    assert f'action="/messages/{path[1].id}/select"' in page
    assert "on another branch" in page
    response = await browser.post(f"/messages/{path[1].id}/select")
    assert response.status_code == 303
    assert response.headers["location"].startswith(f"/chats/{chat_id}")
    page = (await browser.get("/search", params={"q": "needles"})).text
    assert "on another branch" not in page


@pytest.mark.parametrize(
    ("text", "terms", "expected"),
    [
        ("a needle here", ["needle"], "a [needle] here"),
        ("A NEEDLE\n\n  here", ["needle", "HERE"], "A [NEEDLE] [here]"),
        ("x" * 300 + " needle", ["needle"], "… " + "x" * 49 + " [needle]"),
        ("far from here " * 20 + "needle", ["needle"], None),
        ("needle " + "y" * 300, ["needle"], "[needle] " + "y" * 153 + "…"),
        ("aaa", ["aa", "a"], "[aa][a]"),
        ("C++ and c++", ["C++"], "[C++] and [c++]"),
        ("大阪東京都", ["東京"], "大阪[東京]都"),
        ("İstanbul needle", ["needle"], "İstanbul [needle]"),
    ],
)
def test_snippets(text: str, terms: list[str], expected: str | None) -> None:
    pieces = search.snippet(text, terms)
    shown = "".join(f"[{part}]" if hit else part for part, hit in pieces)
    if expected is None:
        assert re.fullmatch(r"… (far|from|here) .*here \[needle\]", shown)
    else:
        assert shown == expected


def test_terms_are_few_and_single() -> None:
    assert search.terms_of(' a  "b" a \0c ') == ["a", '"b"', "c"]
    assert len(search.terms_of(" ".join(map(str, range(100))))) == search.MAX_TERMS
    assert search.terms_of("e\u0301") == ["é"], "as it is typed on other systems"


# Pages of the list


async def test_the_list_goes_on_where_it_ended(
    browser: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_list, "PAGE_CHATS", 3)
    ids = [await browser.new_chat(f"chat {number}") for number in range(7)]
    await settled(server)
    await browser.get("/")
    await browser.post(f"/chats/{ids[0]}/pin", {"pinned": "1"})
    page = (await browser.get(f"/chats/{ids[6]}")).text
    assert titles(page) == ["chat 0", "chat 6", "chat 5"]
    assert 'aria-label="Pinned:"' in page
    seen = titles(page)
    while links := re.findall(r'hx-get="(/chat-list\?[^"]+)"', page):
        assert f"current={ids[6]}" in links[0]
        page = (await browser.get(links[0].replace("&amp;", "&"))).text
        assert "<ul" not in page
        seen += titles(page)
    assert seen == [f"chat {number}" for number in (0, 6, 5, 4, 3, 2, 1)]

    # A list that is brought up to date keeps the pages that were loaded.
    await browser.get("/")
    token = field(browser.page, "_csrf_token")
    for shown, expected in (("6", 6), ("", 3), ("5000", 7), ("x", 3)):
        renamed = await browser.http.post(
            f"/chats/{ids[1]}/rename",
            data={"_csrf_token": token, "title": "chat 1"},
            headers=HTMX | {"X-Chats-Shown": shown},
        )
        assert len(titles(renamed.text)) == expected
        assert ("chat-list__more" in renamed.text) is (expected < 7)

    home = (await browser.get("/")).text
    older = re.findall(r'href="(/\?after=[^"]+)"', home)[0]
    page = (await browser.get(older)).text
    assert titles(page) == ["chat 4", "chat 3", "chat 2"]
    assert "Latest chats" in page


async def test_a_place_that_is_none_shows_the_latest(browser: Browser) -> None:
    await browser.new_chat("only")
    nowhere = "0" * 32
    for after in ("", "x", f"2~2026-01-01~{nowhere}", f"1~2026-99-99~{nowhere}", "0~1~g"):
        assert titles((await browser.get("/", params={"after": after})).text) == ["only"]


def test_places_survive_their_address() -> None:
    cursor = ChatCursor(pinned=True, updated_at=datetime.now(UTC), id="0" * 32)
    assert chat_list.cursor_of(chat_list.as_text(cursor)) == cursor


# Changing the list


async def test_rename_and_pin_by_forms_and_by_htmx(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("first")
    other = await browser.new_chat("second")
    await settled(server)
    response = await browser.post(f"/chats/{chat_id}/rename", {"title": " A  <b> "})
    assert (response.status_code, response.headers["location"]) == (303, f"/chats/{chat_id}")
    response = await browser.post(f"/chats/{chat_id}/pin", {"pinned": "1"}, htmx=True)
    assert titles(response.text) == ["A <b>", "second"]
    assert "A &lt;b&gt;" in response.text
    response = await browser.post(f"/chats/{chat_id}/pin", {"pinned": ""}, htmx=True)
    assert titles(response.text) == ["second", "A <b>"]
    response = await browser.post(
        f"/chats/{chat_id}/rename", {"title": "B", "current": chat_id}, htmx=True
    )
    assert 'hx-target="#chat-title" hx-swap="textContent">B<' in response.text
    for title in ("", " \n ", "x" * 121, "\u200b"):
        response = await browser.post(f"/chats/{other}/rename", {"title": title}, htmx=True)
        assert response.status_code == 400
    assert titles((await browser.get("/")).text) == ["second", "B"]


async def test_a_renamed_chat_keeps_its_name_while_it_goes_on(
    browser: Browser, server: Server
) -> None:
    server.engine.auto = None
    chat_id = await browser.new_chat("the first words")
    turn = await server.engine.next_turn(0)
    await browser.post(f"/chats/{chat_id}/rename", {"title": "My name"})
    turn.say("answer")
    turn.end()
    await settled(server)
    server.engine.auto = "more"
    await browser.say(chat_id, "other words")
    await settled(server)
    assert titles((await browser.get("/")).text) == ["My name"]


async def test_chats_of_others_cannot_be_touched(
    browser: Browser, server: Server, stranger: Browser
) -> None:
    chat_id = await browser.new_chat("mine")
    await settled(server)
    fields = {"title": "theirs", "pinned": "1"}
    for action in ("rename", "pin", "delete", "undo"):
        response = await stranger.post(f"/chats/{chat_id}/{action}", fields)
        assert response.status_code == HIDDEN, action
    await browser.post(f"/chats/{chat_id}/delete")
    assert (await stranger.post(f"/chats/{chat_id}/undo")).status_code == HIDDEN
    for path in ("export/json", "export/markdown"):
        assert (await stranger.get(f"/chats/{chat_id}/{path}")).status_code == HIDDEN
        assert (await browser.get(f"/chats/{chat_id}/{path}")).status_code == HIDDEN, "deleted"


async def test_every_change_needs_the_token(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("mine")
    await settled(server)
    for action in ("rename", "pin", "delete", "undo"):
        response = await browser.http.post(f"/chats/{chat_id}/{action}", data={"title": "x"})
        assert response.status_code == 403, action
    assert titles((await browser.get("/")).text) == ["mine"]


# Deletion


async def test_a_deleted_chat_is_gone_at_once_and_comes_back(
    browser: Browser, server: Server
) -> None:
    chat_id = await browser.new_chat("needle <in> title")
    await settled(server)
    response = await browser.post(f"/chats/{chat_id}/delete", {"current": chat_id})
    assert response.headers["location"] == "/"
    page = (await browser.get("/")).text
    assert titles(page) == []
    assert "Deleted “<bdi>needle &lt;in&gt; title</bdi>”" in page
    assert 0 < int(re.findall(r'data-left-ms="(\d+)"', page)[0]) <= 30_000
    for path in (f"/chats/{chat_id}", f"/chats/{chat_id}/latency"):
        assert (await browser.get(path)).status_code == HIDDEN
    await browser.get("/")
    assert (await browser.post(f"/chats/{chat_id}/delete")).status_code == HIDDEN
    assert (await browser.post(f"/chats/{chat_id}/rename", {"title": "x"})).status_code == HIDDEN
    assert (await browser.post(f"/chats/{chat_id}/warm")).status_code == HIDDEN
    fields = {"text": "go on", "parent_id": ""}
    assert (await browser.post(f"/chats/{chat_id}/messages", fields)).status_code == HIDDEN
    assert "Nothing found" in (await browser.get("/search", params={"q": "needle"})).text
    response = await browser.post(f"/chats/{chat_id}/undo")
    assert (response.status_code, response.headers["location"]) == (303, f"/chats/{chat_id}")
    assert "An answer about" in (await browser.get(f"/chats/{chat_id}")).text
    assert "undo__item" not in (await browser.get("/")).text
    response = await browser.post(f"/chats/{chat_id}/delete", htmx=True)
    assert "undo__item" in response.text
    response = await browser.post(f"/chats/{chat_id}/undo", htmx=True)
    assert titles(response.text) == ["needle <in> title"]
    assert "undo__item" not in response.text


async def test_a_running_answer_is_stopped_before_its_chat_goes(
    browser: Browser, server: Server
) -> None:
    server.engine.auto = None
    chat_id = await browser.new_chat("question")
    turn = await server.engine.next_turn(0)
    turn.say("so far")
    await browser.post(f"/chats/{chat_id}/delete")
    assert server.engine.cancelled == [turn.submit.request_id]
    await browser.post(f"/chats/{chat_id}/undo")
    page = (await browser.get(f"/chats/{chat_id}")).text
    assert "so far" in page
    assert "You stopped this answer." in page


def words_left(data_dir: Path, word: str) -> list[str]:
    files = [path for path in data_dir.rglob("*") if path.is_file()]
    return sorted(
        str(path.relative_to(data_dir)) for path in files if word.encode() in path.read_bytes()
    )


async def test_what_was_deleted_is_purged_after_its_time(
    web_settings: Settings, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purger_module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(purger_module.Purger.__init__, "__kwdefaults__", {"undo": timedelta(0)})
    word = "Qzx7ꙮwords"
    fake_engine.auto = f"an answer with {word}"
    async with serving(web_settings, fake_engine) as server, server.browser() as browser:
        kept = await browser.new_chat("kept")
        chat_id = await browser.new_chat(f"a question with {word}")
        await settled(server)
        await browser.post(f"/chats/{kept}/rename", {"title": "kept title"})
        assert words_left(web_settings.data_dir, word)
        await browser.post(f"/chats/{chat_id}/delete")
        for _ in range(300):
            if fake_engine.forgotten and not await due(server):
                break
            await asyncio.sleep(0.02)
        assert fake_engine.forgotten == [chat_id]
        with closing(sqlite3.connect(web_settings.database_path)) as db:
            assert db.execute("SELECT id FROM chat").fetchall() == [(kept,)]
            blocks = [row[0] for row in db.execute("SELECT block FROM message_search_data")]
        with_rare = [block for block in blocks if "ꙮ".encode() in block]
        # The other chat has the same answer: its words stay in the index.
        assert with_rare
        await browser.post(f"/chats/{kept}/delete")
        for _ in range(300):
            if len(fake_engine.forgotten) == 2 and not await due(server):
                break
            await asyncio.sleep(0.02)
        assert words_left(web_settings.data_dir, word) == []
        assert words_left(web_settings.data_dir, "ꙮ") == []
        assert (await browser.post(f"/chats/{chat_id}/undo")).status_code == HIDDEN, "too late"
    assert words_left(web_settings.data_dir, "ꙮ") == [], "after the end too"


async def due(server: Server) -> bool:
    flag: str | None = await server.app.state.repository.get_setting("search_merge_due")
    return flag != "0"


async def test_a_deletion_outlives_a_restart(
    web_settings: Settings, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(web_settings, fake_engine) as server, server.browser() as browser:
        early = await browser.new_chat("early")
        late = await browser.new_chat("late")
        await settled(server)
        await browser.post(f"/chats/{early}/delete")
        await browser.post(f"/chats/{late}/delete")
        cookies = browser.http.cookies
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        before = datetime.now(UTC) - timedelta(seconds=31)
        db.execute(
            "UPDATE chat SET deleted_at = ? WHERE id = ?",
            (before.strftime("%Y-%m-%d %H:%M:%S.%f"), early),
        )
        db.commit()
    monkeypatch.setattr(purger_module, "LOOK_EVERY_S", 0.02)
    again = FakeEngine()
    async with serving(web_settings, again) as server, server.browser() as browser:
        browser.http.cookies = cookies
        for _ in range(300):
            if early in again.forgotten:
                break
            await asyncio.sleep(0.02)
        assert again.forgotten == [early]
        page = (await browser.get("/")).text
        assert "Deleted “<bdi>late</bdi>”" in page
        assert "early" not in page
        await browser.post(f"/chats/{late}/undo")
        assert titles((await browser.get("/")).text) == ["late"]


async def test_old_backups_go_while_the_server_runs(
    web_settings: Settings, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [migrate.back_up(web_settings.database_path, web_settings.backup_dir) for _ in range(4)]
    monkeypatch.setattr(purger_module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(purger_module, "BACKUPS_EVERY_S", 0.0)
    async with serving(web_settings, fake_engine):
        for _ in range(300):
            if not made[0].exists():
                break
            await asyncio.sleep(0.02)
    assert [path.exists() for path in made] == [False, True, True, True]


async def test_the_menu_has_every_way_without_script(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("only")
    await settled(server)
    page = (await browser.get("/")).text
    for action in ("rename", "pin", "delete"):
        assert f'method="post" action="/chats/{chat_id}/{action}"' in page
    assert hrefs(page, "chat-menu__export") == [
        f"/chats/{chat_id}/export/markdown",
        f"/chats/{chat_id}/export/json",
    ]
    assert field(page, "title") == "only"
    assert '<search class="search-box"><form class="search-box__form" method="get"' in page

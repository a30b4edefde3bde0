"""Routes: whose they are, what they answer without scripts, and what they leave behind."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime

import pytest

from app.settings import Settings
from tests.app.fake_engine import FakeEngine
from tests.app.route_kinds import OF_OWNER, browser_routes
from tests.app.web_client import HTMX, Browser, Server, field, text_of

pytestmark = pytest.mark.anyio

# Every route of the application: what a browser without a login may expect of it.
PUBLIC = {
    ("GET", "/"): 200,
    ("GET", "/favicon.ico"): 204,
    ("GET", "/health"): 200,
    ("GET", "/readyz"): 200,
    ("GET", "/latency"): 200,
    ("GET", "/latency.json"): 200,
    ("GET", "/latency/turns.csv"): 200,
    ("GET", "/latency/turns.json"): 200,
    ("GET", "/metrics"): 200,
    ("GET", "/healthz"): 200,
}
BEGINS_A_USER = {("POST", "/chats")}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def finished_chat(browser: Browser, engine: FakeEngine, text: str = "Hello") -> str:
    """A chat of one turn that has ended."""
    chat_id = await browser.new_chat(text)
    turn = engine.turns[-1]
    turn.say("An answer.")
    turn.end()
    async with asyncio.timeout(5):
        while "hx-sse:connect" in (await browser.get(f"/chats/{chat_id}")).text:
            await asyncio.sleep(0.01)
    return chat_id


async def test_head_is_answered_as_get_without_the_body(browser: Browser) -> None:
    for path in ("/", "/latency", "/health", "/static/app.css"):
        full, head = await browser.http.get(path), await browser.http.head(path)
        assert head.status_code == full.status_code == 200
        assert head.headers["content-length"] == str(len(full.content))
        assert head.headers["content-type"] == full.headers["content-type"]
        assert head.content == b""
    assert (await browser.http.head("/none")).status_code == 404


@pytest.mark.parametrize(
    "before",
    [
        "garbage",
        "",
        "2020-01-01",
        "9999-12-31T23:59:59",
        "0001-01-01T00:00:00%2B14:00",
        "1e9",
        "%00",
    ],
)
async def test_a_link_to_older_chats_that_names_no_time_shows_the_page(
    browser: Browser, before: str
) -> None:
    response = await browser.get(f"/?before={before}")
    assert response.status_code == 200
    assert "composer-text" in response.text


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/none", 404, "There is no such page."),
        ("GET", "/static/none.css", 404, "There is no such page."),
        ("GET", "/chats/none", 404, "There is no such page."),
        ("GET", "/chats", 405, "This page cannot be asked in that way."),
    ],
)
async def test_problems_of_addresses_are_told_in_our_words(
    browser: Browser, method: str, path: str, status: int, says: str
) -> None:
    response = await browser.http.request(method, path)
    assert response.status_code == status
    assert ("allow" in response.headers) is (status == 405)
    words = text_of(response.text)
    assert says in words
    assert words.count("Back to the start") == 1
    for others in ("Not Found", "Not Allowed", "no file or directory"):
        assert others not in words


async def test_unknown_figures_have_no_unit_and_reasons_are_sentences(browser: Browser) -> None:
    words = text_of((await browser.get("/latency")).text)
    assert "\N{EN DASH} ms" not in words
    assert re.search(r"Checkpoints: \w+\. [A-Z][^.]*\.\n", words)


# Pages that show a user what is theirs, and how to ask them for another's.
OWN = {
    "/chat-list": "/chat-list",
    "/search": "/search?q=ell",
    "/history": "/history",
    "/history/import": "/history",
    "/history/export/json": "/history/export/json",
    "/history/export/markdown": "/history/export/markdown",
}


MINE = {"text": "mine now", "title": "mine now", "name": "mine now", "parent_id": ""}


async def test_each_route_with_an_id_is_404_for_everybody_else(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await finished_chat(browser, server.engine)
    running_chat_id = await browser.new_chat("runs")
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        [(turn_id,)] = db.execute("SELECT id FROM turn WHERE running IS NULL").fetchall()
        [(message_id,)] = db.execute("SELECT message_id FROM turn WHERE running IS NULL").fetchall()
        [(running_id,)] = db.execute("SELECT id FROM turn WHERE running IS NOT NULL").fetchall()
    ids = {"chat_id": chat_id, "turn_id": turn_id, "message_id": message_id, "job_id": turn_id}
    ids |= {"login_id": turn_id, "key_id": turn_id, "assistant_id": turn_id}
    others = ids | {"chat_id": running_chat_id, "turn_id": running_id}
    async with server.browser() as nobody, server.browser() as stranger:
        await finished_chat(stranger, server.engine, "a user of their own")
        before = _dump(web_settings)
        for method, path in sorted(OF_OWNER):
            for known in (ids, others):
                address = path.format(**known)
                for other in (nobody, stranger):
                    for htmx in (False, True):
                        if method == "GET":
                            response = await other.get(address, headers=HTMX if htmx else {})
                        else:
                            response = await other.post(address, MINE, htmx=htmx)
                        assert response.status_code == 404, (method, address)
                        assert "Hello" not in response.text
        assert _dump(web_settings) == before
        assert server.engine.warmed == []
        assert server.engine.cancelled == []
        for path in ("/", "/latency", "/latency.json", *OWN.values()):
            page = (await stranger.get(path)).text
            assert chat_id not in page
            assert "Hello" not in page
    assert (await browser.get(f"/chats/{chat_id}/latency")).status_code == 200


def _dump(settings: Settings) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(settings.database_path)) as db:
        messages = db.execute("SELECT id, text, status FROM message ORDER BY id").fetchall()
        return messages + db.execute("SELECT id, title FROM chat ORDER BY id").fetchall()


async def test_public_routes_make_no_user(server: Server, web_settings: Settings) -> None:
    assert set(PUBLIC) | BEGINS_A_USER < browser_routes(server.app)
    async with server.browser() as nobody:
        for (_, path), status in PUBLIC.items():
            assert (await nobody.get(path)).status_code == status, path
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        assert db.execute("SELECT count(*) FROM user").fetchall() == [(0,)]


async def test_reading_and_sending_work_without_scripts(browser: Browser, server: Server) -> None:
    await browser.get("/")
    assert "No chats yet." in browser.page
    chat_id = await browser.new_chat("A first question, which names the chat")
    assert "A first question, which names the chat" in browser.page
    assert f'<noscript><a class="message__refresh" href="/chats/{chat_id}' in browser.page
    assert ">Queue</button>" in browser.page
    turn = await server.engine.next_turn(0)
    turn.say("Some **text** so far")
    await until(lambda: server.app.state.services.hub.running()[0].text.endswith("far"))
    await browser.get(f"/chats/{chat_id}")
    assert "<strong>text</strong> so far" in browser.page
    stopped = await browser.post(f"/turns/{browser.turn_id}/stop")
    assert stopped.status_code == 303
    await browser.get(stopped.headers["location"])
    assert "You stopped this answer." in browser.page
    retried = await browser.post(f"/messages/{field(browser.page, 'parent_id')}/retry")
    assert retried.status_code == 303
    (await server.engine.next_turn(1)).end()
    await until(lambda: not server.app.state.services.hub.running())
    sent = await browser.say(chat_id, "Second")
    assert sent.status_code == 303
    assert sent.headers["location"].startswith(f"/chats/{chat_id}#message-")
    renamed = await browser.post(f"/chats/{chat_id}/rename", {"title": "  Another\n name "})
    assert renamed.status_code == 303
    assert "<h1" in (await browser.get(f"/chats/{chat_id}")).text
    assert ">Another name</h1>" in browser.page


async def test_scripts_get_fragments(browser: Browser, server: Server) -> None:
    await browser.get("/")
    fields = {"text": "Hi", "assistant_id": field(browser.page, "assistant_id")}
    begun = await browser.post("/chats", fields, htmx=True)
    assert begun.status_code == 200
    assert begun.headers["hx-redirect"].startswith("/chats/")
    assert "HX-Request" in begun.headers["vary"]
    chat_id = begun.headers["hx-redirect"].removeprefix("/chats/")
    (await server.engine.next_turn(0)).end()
    await until(lambda: not server.app.state.services.hub.running())
    sent = await browser.say(chat_id, "More", htmx=True)
    assert sent.status_code == 200
    assert "<html" not in sent.text
    assert sent.text.index("message--user") < sent.text.index("message--assistant")
    assert 'hx-sse:connect="/turns/' in sent.text
    for target in ("#composer-controls", "#composer-text", "#chat-list", "#notice"):
        assert f'<hx-partial hx-target="{target}"' in sent.text
    fields = {"title": "New", "current": chat_id}
    renamed = await browser.post(f"/chats/{chat_id}/rename", fields, htmx=True)
    assert 'id="chat-list"' in renamed.text
    assert '<hx-partial hx-target="#chat-title" hx-swap="textContent">New</hx-partial>' in (
        renamed.text
    )
    empty = await browser.post(f"/chats/{chat_id}/rename", {"title": " \n"}, htmx=True)
    assert empty.status_code == 400
    missing = await browser.get(f"/chats/{'0' * 32}", headers=HTMX)
    assert missing.status_code == 404
    assert missing.headers["hx-retarget"] == "#notice"
    assert "<html" not in missing.text
    # Back asks for the whole page.
    full = {"HX-Request": "true", "HX-Request-Type": "full"}
    assert "<html" in (await browser.get(f"/chats/{chat_id}", headers=full)).text


async def purge_now(server: Server) -> None:
    """Purge what was deleted, as if it could no longer be undone."""
    services = server.app.state.services
    await services.repository.purge_deleted(datetime.now(UTC))
    await services.upkeep.forget_deleted()


async def test_a_deleted_chat_is_stopped_purged_and_forgotten_by_the_engine(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    secret = "a-sentence-that-must-not-stay-anywhere"
    chat_id = await browser.new_chat(secret)
    turn = await server.engine.next_turn(0)
    turn.say(f"You said {secret}")
    await browser.post(f"/chats/{chat_id}/delete", {"current": chat_id}, htmx=True)
    assert server.engine.cancelled == [turn.submit.request_id]
    assert (await browser.get(f"/chats/{chat_id}")).status_code == 404
    assert server.engine.forgotten == []  # it can still be undone
    await purge_now(server)
    assert server.engine.forgotten == [chat_id]
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        for table in ("chat", "message", "turn", "turn_latency"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchall() == [(0,)], table
    for path in web_settings.data_dir.glob("rejoinder.db*"):
        assert secret.encode() not in path.read_bytes(), path


async def test_a_chat_deleted_while_the_engine_is_away_is_forgotten_later(
    browser: Browser, server: Server
) -> None:
    chat_id = await finished_chat(browser, server.engine)
    server.engine.alive = False
    assert (await browser.post(f"/chats/{chat_id}/delete")).status_code == 303
    await purge_now(server)
    assert server.engine.forgotten == []
    server.engine.alive = True
    await until(lambda: server.engine.forgotten == [chat_id])


async def test_looking_at_a_chat_warms_it(browser: Browser, server: Server) -> None:
    chat_id = await finished_chat(browser, server.engine)
    assert f'data-warm-url="/chats/{chat_id}/warm"' in browser.page
    assert server.engine.warmed == []
    assert (await browser.post(f"/chats/{chat_id}/warm", htmx=True)).status_code == 204
    [warm] = server.engine.warmed
    submit = server.engine.turns[0].submit
    assert warm.chat_id == chat_id
    assert warm.prefix_ids == submit.prefix_ids
    assert warm.history_ids == submit.new_ids + list(b"An answer.")


async def test_a_chat_of_another_tokenizer_can_be_read_but_not_continued(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await finished_chat(browser, server.engine)
    with closing(sqlite3.connect(web_settings.database_path)) as db, db:
        db.execute("UPDATE prefix SET tokenizer_digest = 'another'")
    refused = await browser.say(chat_id, "Go on")
    assert refused.status_code == 409
    assert "made with another model" in refused.text
    assert "An answer." in refused.text


async def test_readiness_follows_the_engine(
    browser: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await browser.get("/readyz")).json()["status"] == "ready"
    server.engine.step_age_ms = 60_000.0
    stuck = await browser.get("/readyz")
    assert stuck.status_code == 503
    assert "60 s ago" in stuck.json()["reason"]
    server.engine.step_age_ms = 1.0
    server.engine.stats_hang = True
    monkeypatch.setattr("app.routes.health.STATS_WAIT_S", 0.05)
    assert (await browser.get("/readyz")).status_code == 503
    server.engine.alive = False
    assert (await browser.get("/readyz")).status_code == 503
    assert (await browser.get("/health")).status_code == 503
    assert (await browser.get("/healthz")).status_code == 200


async def test_errors_are_pages_fragments_or_json_as_asked(browser: Browser) -> None:
    page = await browser.get("/nowhere")
    assert page.status_code == 404
    assert "<html" in page.text
    fragment = await browser.get("/nowhere", headers=HTMX)
    assert fragment.status_code == 404
    assert "<html" not in fragment.text
    data = await browser.get("/nowhere.json")
    assert data.status_code == 404
    assert data.json()["status"] == 404
    wrong_method = await browser.get("/chats")
    assert wrong_method.status_code == 405
    no_token = await browser.http.post("/chats", data={"text": "x"}, headers=HTMX)
    assert no_token.status_code == 403
    assert "Reload" in text_of(no_token.text)


async def test_a_fault_of_ours_is_a_500_with_words_and_a_log_line(
    browser: Browser,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    chat_id = await finished_chat(browser, server.engine)
    monkeypatch.setattr(server.app.state.services.repository, "path", broken)
    response = await browser.get(f"/chats/{chat_id}")
    assert response.status_code == 500
    assert "a fault of ours" not in response.text
    assert "its log says why" in response.text
    assert "a fault of ours" in caplog.text
    assert "GET /chats/{chat_id} failed" in caplog.text
    monkeypatch.setattr(server.app.state.services.repository, "link", broken)
    secret = "s" * 43
    assert (await browser.get(f"/invitations/{secret}")).status_code == 500
    assert "GET /invitations/{token} failed" in caplog.text
    # whoever reads the log could use it; the client of this test may log what it asks for
    ours = [record for record in caplog.records if record.name.startswith("app.")]
    assert ours
    assert not any(secret in caplog.handler.format(record) for record in ours)


async def test_static_files_are_kept_by_their_content(browser: Browser) -> None:
    found = re.search(r'href="(/static/app\.css\?v=[0-9a-f]+)"', browser.page)
    assert found is not None, "app.css is missing"
    kept = await browser.get(found[1])
    assert kept.headers["cache-control"] == "public, max-age=31536000, immutable"
    bare = await browser.get("/static/app.css")
    assert bare.headers["cache-control"] == "no-cache"

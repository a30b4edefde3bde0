"""Accounts on one's own machine: a guest becomes one, signs in elsewhere, and leaves."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing

import pytest

from app.accounts.service import TRIES_OF_A_NAME
from app.settings import Settings
from tests.app.account_support import (
    PASSWORD,
    chats_of,
    claim,
    cookie,
    quick_passwords,
    sign_in,
)
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import Browser, Server, field, text_of

__all__ = ["quick_passwords"]

pytestmark = pytest.mark.anyio


async def ended_chat(browser: Browser, engine: FakeEngine, text: str = "Hello") -> str:
    chat_id = await browser.new_chat(text)
    engine.turns[-1].say("An answer.")
    engine.turns[-1].end()
    async with asyncio.timeout(5):
        while "hx-sse:connect" in (await browser.get(f"/chats/{chat_id}")).text:
            await asyncio.sleep(0.01)
    return chat_id


async def test_a_guest_claims_a_name_and_keeps_the_chats(server: Server, browser: Browser) -> None:
    chat_id = await ended_chat(browser, server.engine)
    guest_login = cookie(browser)
    await claim(browser, "Ada")
    assert cookie(browser) != guest_login
    page = (await browser.get("/account")).text
    assert "Ada" in text_of(page)
    assert chats_of(page) == {chat_id}
    async with server.browser() as old:
        old.http.cookies.set("rejoinder_login", guest_login or "")
        assert (await old.get(f"/chats/{chat_id}")).status_code == 404
    async with server.browser() as elsewhere:
        signed_in = await sign_in(elsewhere, "  aDA ")
        assert signed_in.headers["location"] == "/"
        assert chats_of((await elsewhere.get("/")).text) == {chat_id}
        assert (await elsewhere.get(f"/chats/{chat_id}")).status_code == 200


async def test_a_name_is_taken_once(server: Server, browser: Browser) -> None:
    await claim(browser, "Ada")
    async with server.browser() as other:
        await other.get("/account")
        refused = await other.post("/account/claim", {"name": "ADA", "password": PASSWORD})
        assert refused.status_code == 409
        assert "choose another" in refused.text
        assert field(refused.text, "name") == "ADA"
        await other.get("/account")
        short = await other.post("/account/claim", {"name": "Bob", "password": "1234567"})
        assert short.status_code == 400
        assert "8 to 1,024" in short.text
    again = await browser.post("/account/claim", {"name": "Eve", "password": PASSWORD})
    assert again.status_code == 400
    assert "Eve" not in text_of((await browser.get("/account")).text)


async def test_wrong_names_and_wrong_passwords_look_the_same(
    server: Server, browser: Browser
) -> None:
    await claim(browser, "Ada")
    answers = []
    for name, password in (("Ada", "not the password"), ("Nobody", PASSWORD)):
        async with server.browser() as other:
            refused = await sign_in(other, name, password)
            assert cookie(other) is None
            words = text_of(refused.text).replace(name, "NAME")
            names = re.sub(r'value="[^"]*"', "", refused.text)
            answers.append((refused.status_code, words, len(names)))
    assert answers[0] == answers[1]
    assert answers[0][0] == 401


async def test_tries_are_counted_for_known_and_unknown_names(
    server: Server, browser: Browser
) -> None:
    await claim(browser, "Ada")
    server.app.state.services.accounts._addresses._tries = 1000
    texts = []
    for name in ("Ada", "Nobody"):
        async with server.browser() as other:
            for _ in range(TRIES_OF_A_NAME):
                assert (await sign_in(other, name, "a guess")).status_code == 401
            refused = await sign_in(other, name, PASSWORD)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            words = text_of(refused.text).replace(name, "")
            texts.append(re.sub(r"\d+", "N", words))  # how long to wait goes with the clock
    assert texts[0] == texts[1]


async def test_an_address_runs_out_of_tries_whatever_the_names(
    server: Server, browser: Browser
) -> None:
    server.app.state.services.accounts._addresses._tries = 3
    statuses = [(await sign_in(browser, f"name {n}", "a guess")).status_code for n in range(5)]
    assert statuses == [401, 401, 401, 429, 429]


async def test_signing_in_makes_new_tokens_and_ends_the_old_login(
    server: Server, browser: Browser
) -> None:
    await claim(browser, "Ada")
    async with server.browser() as other:
        await other.new_chat("A guest's chat")
        planted, csrf = cookie(other), cookie(other, "rejoinder_csrf")
        await sign_in(other, "Ada")
        assert cookie(other) not in (None, planted)
        assert cookie(other, "rejoinder_csrf") != csrf
        stale = await other.http.post("/sign-out", data={"_csrf_token": csrf or ""})
        assert stale.status_code == 403
    async with server.browser() as thief:
        thief.http.cookies.set("rejoinder_login", planted or "")
        assert chats_of((await thief.get("/")).text) == set()


@pytest.mark.parametrize("take", [True, False])
async def test_a_guests_chats_come_along_or_wait(
    take: bool, server: Server, browser: Browser
) -> None:
    own = await ended_chat(browser, server.engine, "Of Ada")
    await claim(browser, "Ada")
    async with server.browser() as other:
        guests = await ended_chat(other, server.engine, "Of the guest")
        page = (await other.get("/sign-in")).text
        assert 'name="take_along"' in page
        await sign_in(other, "Ada", **({"take_along": "1"} if take else {}))
        assert chats_of((await other.get("/")).text) == ({own, guests} if take else {own})
        assert ("guest has" in (await other.get("/account")).text) is not take
        left = await other.post("/sign-out")
        assert left.headers["location"] == "/"
        assert chats_of((await other.get("/")).text) == (set() if take else {guests})
    assert chats_of((await browser.get("/")).text) == ({own, guests} if take else {own})


async def test_left_chats_can_be_taken_along_later(server: Server, browser: Browser) -> None:
    await claim(browser, "Ada")
    async with server.browser() as other:
        guests = await ended_chat(other, server.engine)
        await sign_in(other, "Ada")
        await other.get("/account")
        assert (await other.post("/account/guest")).status_code == 303
        page = (await other.get("/account")).text
        assert chats_of(page) == {guests}
        assert "guest has" not in page
        assert (await other.post("/account/guest")).status_code == 404


async def test_a_browser_without_a_guest_is_offered_nothing(
    server: Server, browser: Browser
) -> None:
    await claim(browser, "Ada")
    async with server.browser() as other:
        assert 'name="take_along"' not in (await other.get("/sign-in")).text
        await sign_in(other, "Ada", take_along="1")
        await other.get("/account")
        await other.post("/sign-out")
        assert cookie(other) is None
        assert "Guest" in (await other.get("/")).text


@pytest.mark.parametrize("target", ["//evil.example/", "https://evil.example", "/\\evil.example"])
async def test_signing_in_leads_nowhere_else(target: str, server: Server, browser: Browser) -> None:
    await claim(browser, "Ada")
    async with server.browser() as other:
        page = (await other.get("/sign-in", params={"next_path": target})).text
        assert "evil" not in page
        assert (await sign_in(other, "Ada", next_path=target)).headers["location"] == "/"
    ahead = await browser.get("/sign-in", params={"next_path": target})
    assert (ahead.status_code, ahead.headers["location"]) == (303, "/")
    ahead = await browser.get("/sign-in", params={"next_path": "/account"})
    assert ahead.headers["location"] == "/account"


async def test_logins_are_listed_and_end_one_by_one_or_all(
    server: Server, browser: Browser
) -> None:
    await claim(browser, "Ada")
    async with server.browser() as second, server.browser() as third:
        second.http.headers["user-agent"] = "Mozilla/5.0 (Windows NT 10.0) Firefox/140.0"
        guests = await ended_chat(second, server.engine)
        await sign_in(second, "Ada")
        await sign_in(third, "Ada")
        page = (await browser.get("/account")).text
        assert page.count('class="account__item"') == 3
        assert "Firefox on Windows" in page
        assert page.count("this one") == 1
        shown = page[page.index("Firefox on Windows") :]
        path = re.search(r'action="(/account/logins/[0-9a-f]{32}/end)"', shown)
        assert path is not None
        assert (await third.get("/account")).status_code == 200
        assert (await browser.post(path[1])).status_code == 303
        # The browser whose login ended is its guest's again.
        after = (await second.get("/account")).text
        assert "You are a guest" in after
        assert chats_of(after) == {guests}
        assert (await browser.post(path[1])).status_code == 404
        await browser.get("/account")
        assert (await browser.post("/account/sign-out-everywhere")).status_code == 303
        assert "You are a guest" in (await third.get("/account")).text
        assert "You are a guest" in (await browser.get("/account")).text


async def test_a_new_password_ends_all_other_logins(server: Server, browser: Browser) -> None:
    await claim(browser, "Ada")
    before = cookie(browser)
    async with server.browser() as other:
        await sign_in(other, "Ada")
        wrong = await browser.post(
            "/account/password", {"old_password": "a guess at it", "password": "a newer password"}
        )
        assert wrong.status_code == 401
        assert "Ada" in (await other.get("/account")).text
        changed = await browser.post(
            "/account/password", {"old_password": PASSWORD, "password": "a newer password"}
        )
        assert changed.status_code == 200
        assert "Your password was changed." in changed.text
        assert cookie(browser) != before
        assert "You are a guest" in (await other.get("/account")).text
        assert "Ada" in (await browser.get("/account")).text
        assert (await sign_in(other, "Ada")).status_code == 401
        assert (await sign_in(other, "Ada", "a newer password")).status_code == 303


async def test_keys_are_shown_once_and_end(server: Server, browser: Browser) -> None:
    await browser.get("/account")
    made = await browser.post("/account/keys", {"key_name": "my script"})
    [key] = re.findall(r'id="new-key">(rj-[A-Za-z0-9_-]{43})<', made.text)
    headers = {"Authorization": f"Bearer {key}"}
    async with server.browser() as program:
        assert (await program.http.get("/v1/models", headers=headers)).status_code == 200
        page = (await browser.get("/account")).text
        assert "my script" in page
        assert key not in page
        revoke = re.search(r'action="(/account/keys/[0-9a-f]{32}/revoke)"', page)
        assert revoke is not None
        await program.post("/chats", {"text": "", "assistant_id": ""})
        await program.get("/")
        assert (await program.post(revoke[1])).status_code == 404
        assert (await program.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await browser.post(revoke[1])).status_code == 303
        assert (await program.http.get("/v1/models", headers=headers)).status_code == 401
    assert "my script" not in (await browser.get("/account")).text
    assert (await browser.post("/account/keys", {"key_name": "  "})).status_code == 400


async def test_a_deleted_account_leaves_nothing(
    server: Server, browser: Browser, web_settings: Settings
) -> None:
    chat_id = await ended_chat(browser, server.engine, "words to be forgotten")
    running_id = await browser.new_chat("it is still answered")
    await claim(browser, "Ada")
    made = await browser.post("/account/keys", {"key_name": "k"})
    [key] = re.findall(r'id="new-key">(rj-[A-Za-z0-9_-]{43})<', made.text)
    async with server.browser() as other:
        await sign_in(other, "Ada")
        await browser.get("/account")
        wrong = await browser.post("/account/delete", {"old_password": "a guess at it"})
        assert wrong.status_code == 401
        gone = await browser.post("/account/delete", {"old_password": PASSWORD})
        assert (gone.status_code, gone.headers["location"]) == (303, "/")
        assert "You are a guest" in (await other.get("/account")).text
        assert "You are a guest" in (await browser.get("/account")).text
        for one in (chat_id, running_id):
            assert (await other.get(f"/chats/{one}")).status_code == 404
        headers = {"Authorization": f"Bearer {key}"}
        assert (await other.http.get("/v1/models", headers=headers)).status_code == 401
        assert (await sign_in(other, "Ada")).status_code == 401
        await claim(other, "Ada")  # the name is free
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        due = db.execute("SELECT count(*) FROM chat WHERE deleted_at IS NOT NULL").fetchone()
        running = db.execute("SELECT count(*) FROM turn WHERE running IS NOT NULL").fetchone()
        names = db.execute("SELECT count(*) FROM user WHERE name IS NOT NULL").fetchone()
    assert (due, running, names) == ((2,), (0,), (1,))


async def test_on_ones_own_machine_nobody_must_sign_in(server: Server, browser: Browser) -> None:
    assert (await browser.get("/")).status_code == 200
    assert (await browser.get("/people")).status_code == 200, "who sits here is the operator"
    page = (await browser.get("/")).text
    assert 'href="/account"' in page
    assert cookie(browser) is None, "looking makes no guest"
    await ended_chat(browser, server.engine)


async def test_forwarded_requests_are_refused_on_ones_own_machine(browser: Browser) -> None:
    refused = await browser.http.get("/", headers={"X-Forwarded-For": "203.0.113.9"})
    assert refused.status_code == 400
    assert "public_url" in refused.text


async def test_a_stream_ends_with_the_login_that_opened_it(
    server: Server, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.accounts.watching.CHECK_S", 0.0)
    await claim(browser, "Ada")
    await browser.new_chat("Hello")
    turn = server.engine.turns[-1]
    async with server.browser() as other:
        await sign_in(other, "Ada")
        async with browser.events(browser.turn_id) as events:
            turn.say("Said before.")
            while "Said before." not in (await events.next())[1]:
                pass
            await other.get("/account")
            await other.post("/account/sign-out-everywhere")
            turn.say("\n\nSaid after.")
            rest = await events.rest()
            assert not any("Said after" in data for _, data in rest)
            assert "turn-end" not in [name for name, _ in rest]
        refused = await browser.http.get(f"/turns/{browser.turn_id}/events")
        assert refused.status_code == 404
    turn.end()

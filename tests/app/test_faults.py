"""The database's disk is full, somebody holds the database, the clock goes back: told, not lost."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

import sessions.clock
import sessions.database
from app.settings import Settings
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import Browser, Server, field, serving, text_of

pytestmark = pytest.mark.anyio


def rows(settings: Settings, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(settings.database_path)) as db:
        return db.execute(query).fetchall()


async def answered(server: Server, browser: Browser, chat_id: str, text: str, number: int) -> str:
    """Have the engine say `text` as its next answer; the page once it is there."""
    turn = await server.engine.next_turn(number)
    turn.say(text)
    turn.end()
    async with asyncio.timeout(10):
        while True:
            page = (await browser.get(f"/chats/{chat_id}")).text
            if text in text_of(page) and 'aria-busy="true"' not in page:
                return page
            await asyncio.sleep(0.01)


def limit_pages(spare: int) -> Callable[[AsyncConnection], Any]:
    """Let the database grow by so many pages; the disk is full then, as far as it can tell."""

    async def change(db: AsyncConnection) -> None:
        pages = (await db.exec_driver_sql("PRAGMA page_count")).scalar_one()
        await db.exec_driver_sql(f"PRAGMA max_page_count = {pages + spare}")

    return change


@pytest.mark.parametrize("htmx", [False, True])
async def test_a_full_disk_is_told_and_the_text_is_kept(
    browser: Browser,
    server: Server,
    web_settings: Settings,
    caplog: pytest.LogCaptureFixture,
    htmx: bool,
) -> None:
    chat_id = await browser.new_chat("Hello")
    await answered(server, browser, chat_id, "Hello to you", 0)
    before = rows(web_settings, "SELECT id, text FROM message")
    database = server.app.state.repository._database
    long = "long words " * 60
    await database.write(limit_pages(0))
    with caplog.at_level(logging.ERROR):
        refused = await browser.say(chat_id, long, htmx=htmx)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "its disk is full" in text_of(refused.text)
    assert htmx or long.strip() in text_of(refused.text)
    assert "database or disk is full" in caplog.text
    health = await browser.get("/health")  # what is there can be read
    assert health.status_code == 200
    assert health.json()["database_trouble"] == "database or disk is full"
    assert "rejoinder_database_up 0.0" in (await browser.get("/metrics")).text
    assert long not in caplog.text
    assert rows(web_settings, "SELECT id, text FROM message") == before
    assert "Hello to you" in text_of((await browser.get(f"/chats/{chat_id}")).text)
    await database.write(limit_pages(1 << 20))
    assert (await browser.say(chat_id, long)).status_code == 303
    await answered(server, browser, chat_id, "All of it arrived", 1)
    assert (await browser.get("/health")).json()["database_trouble"] is None
    assert "rejoinder_database_up 1.0" in (await browser.get("/metrics")).text
    # no place of the queue stays taken by what was refused
    assert server.engine.places.in_use == 0


async def test_another_process_holds_the_database_for_three_seconds(
    browser: Browser,
    server: Server,
    web_settings: Settings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions.database, "SLOW_S", 1.0)
    chat_id = await browser.new_chat("Hello")
    await answered(server, browser, chat_id, "Hello to you", 0)
    with closing(sqlite3.connect(web_settings.database_path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        asked = asyncio.create_task(browser.say(chat_id, "Are you there?"))
        loop = asyncio.get_running_loop()
        ends = loop.time() + 3.0
        async with Browser(server.url) as reader:
            while loop.time() < ends:  # what only reads is answered meanwhile
                async with asyncio.timeout(1.0):
                    assert (await reader.get("/healthz")).status_code == 200
                await asyncio.sleep(0.1)
            async with asyncio.timeout(10):
                while (await reader.get("/health")).json()["database_trouble"] is None:
                    await asyncio.sleep(0.05)
            assert "another program has been holding the database" in caplog.text
        assert not asked.done()
        other.execute("COMMIT")
    assert (await asked).status_code == 303
    page = await answered(server, browser, chat_id, "I am", 1)
    assert "Are you there?" in text_of(page)
    assert (await browser.get("/health")).json()["database_trouble"] is None


async def test_another_process_keeps_the_database(
    browser: Browser,
    server: Server,
    web_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer than a write waits: the user is told, keeps the text, and can try again."""
    chat_id = await browser.new_chat("Hello")
    await answered(server, browser, chat_id, "Hello to you", 0)
    database = server.app.state.repository._database

    async def wait_briefly(db: AsyncConnection) -> None:
        await db.exec_driver_sql("PRAGMA busy_timeout = 50")

    await database.write(wait_briefly)
    with closing(sqlite3.connect(web_settings.database_path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused = await browser.say(chat_id, "Are you there?")
        assert refused.status_code == 503
        assert "another program holds its database" in text_of(refused.text)
        assert "Are you there?" in refused.text
        told = (await browser.get("/health")).json()
        assert told["database_trouble"] == "database is locked"
        other.execute("COMMIT")
    assert (await browser.say(chat_id, "Are you there?")).status_code == 303
    await answered(server, browser, chat_id, "I am", 1)


async def test_the_database_writer_dies(
    browser: Browser,
    server: Server,
    web_settings: Settings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Health, log and user are told; what was stored stays, and the next message is stored."""
    chat_id = await browser.new_chat("Hello")
    await answered(server, browser, chat_id, "Hello to you", 0)
    await browser.say(chat_id, "And then?")
    turn = await server.engine.next_turn(1)
    turn.say("Half of it")
    database = server.app.state.repository._database

    async def fails(*_: object) -> None:
        raise RuntimeError("a defect of the writer")

    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(sessions.database, "RESTART_DELAYS_S", (0.0,))
        broken.setattr(database, "_commit", fails)
        chat = await browser.get("/")
        fields = {"text": "Anybody?", "assistant_id": field(chat.text, "assistant_id")}
        refused = await browser.post("/chats", fields)
        assert refused.status_code == 503
        assert "The server could not store this" in text_of(refused.text)
        assert "Anybody?" in refused.text, "the text is kept"
        told = (await browser.get("/health")).json()
        assert told["database_trouble"] == "the writer failed: RuntimeError"
        assert "Hello to you" in text_of((await browser.get(f"/chats/{chat_id}")).text)
    assert "writer failed and begins anew" in caplog.text
    assert "Anybody?" not in caplog.text
    turn.say(" and the rest")
    turn.end()
    async with asyncio.timeout(10):
        while True:
            page = (await browser.get(f"/chats/{chat_id}")).text
            if 'aria-busy="true"' not in page:
                break
            await asyncio.sleep(0.01)
    assert "Half of it and the rest" in text_of(page)
    assert rows(web_settings, "SELECT text FROM message WHERE status = 'complete'")
    assert (await browser.post("/chats", fields)).status_code == 303
    assert (await browser.get("/health")).json()["database_trouble"] is None


class SetClock:
    """Stands for `datetime` where rows get their times."""

    min = datetime.min

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self, zone: Any) -> datetime:
        assert zone is UTC
        return datetime.now(zone) + self.ahead


async def test_the_clock_jumps_backwards(
    web_settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a run and over a restart: messages and continued answers keep their order."""
    clock = SetClock()
    monkeypatch.setattr(sessions.clock, "datetime", clock)
    async with serving(web_settings, FakeEngine()) as first, first.browser() as browser:
        chat_id = await browser.new_chat("One")
        await answered(first, browser, chat_id, "First", 0)
        clock.ahead = timedelta(hours=-2)
        await browser.say(chat_id, "Two")
        turn = await first.engine.next_turn(1)
        turn.say("Second so far,")
        await browser.get(f"/chats/{chat_id}")
        cookies = browser.http.cookies
    told = [one for one in caplog.messages if "the system's clock went back by" in one]
    assert len(told) == 1, "once, not at every message"
    found = re.search(r"went back by (\d+) s", told[0])
    assert found is not None
    assert 3600 < int(found[1]) <= 7200
    clock.ahead = timedelta(days=-2)
    async with serving(web_settings, FakeEngine()) as second:
        back = Browser(second.url)
        back.http.cookies = cookies
        page = (await back.get(f"/chats/{chat_id}")).text
        assert 'data-status="interrupted"' in page
        answer = field(page, "parent_id")
        assert (await back.post(f"/messages/{answer}/continue")).status_code == 303
        page = await answered(second, back, chat_id, " and all of it", 0)
        text = text_of(page)
        assert "Second so far, and all of it" in text
        assert text.index("One") < text.index("First") < text.index("Two")
        await back.say(chat_id, "Three")
        text = text_of(await answered(second, back, chat_id, "Third", 1))
        assert text.index("Two") < text.index("Second so far") < text.index("Three")
        assert text.index("Three") < text.index("Third")
        times = rows(web_settings, "SELECT created_at FROM turn ORDER BY rowid")
        assert times == sorted(times), "a later turn has a later time"
        await back.http.aclose()


async def test_the_engine_cannot_be_started_again(browser: Browser, server: Server) -> None:
    """Its model cannot be read, say: history is readable, a message is kept, all is told."""
    chat_id = await browser.new_chat("Hello")
    await answered(server, browser, chat_id, "Hello to you", 0)
    server.engine.alive = False
    health = await browser.get("/health")
    assert health.status_code == 503
    assert health.json()["reason"] == "the engine is being started again"
    assert (await browser.get("/readyz")).status_code == 503
    assert (await browser.get("/healthz")).status_code == 200
    assert "rejoinder_engine_up 0.0" in (await browser.get("/metrics")).text
    assert "Hello to you" in text_of((await browser.get(f"/chats/{chat_id}")).text)
    refused = await browser.say(chat_id, "Are you there?")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "The engine is being started again" in text_of(refused.text)
    assert "Are you there?" in refused.text
    server.engine.alive = True
    assert (await browser.say(chat_id, "Are you there?")).status_code == 303
    await answered(server, browser, chat_id, "I am", 1)
    assert (await browser.get("/health")).status_code == 200

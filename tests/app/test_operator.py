"""The operator's page: what it counts, what it does, and that it is for operators alone."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime

import pytest

from app.settings import Settings
from sessions.chunks import ChunkStore
from sessions.repository import Repository
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import HTMX, Browser, Server, text_of
from tests.sessions.chunk_support import STRIPE_BYTES, save, token_ids

pytestmark = pytest.mark.anyio

PATHS = (("GET", "/operator"), ("GET", "/operator/check"), ("POST", "/operator/check"),
         ("POST", "/operator/collect"))  # fmt: skip


@pytest.fixture
async def store(web_settings: Settings) -> AsyncIterator[ChunkStore]:
    """A chunk store as an engine process would have it open."""
    store = ChunkStore(web_settings.chunk_dirs, web_settings.checkpoint_cap_mib << 20)
    yield store
    store.close()


async def rows(browser: Browser, caption: str) -> list[list[str]]:
    """The cells of a table on the operator's page."""
    page = (await browser.get("/operator")).text
    table = re.search(rf'aria-label="{caption}">(.*?)</table>', page, re.DOTALL)
    assert table is not None, text_of(page)
    return [
        [text_of(cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr>(.*?)</tr>", table[1], re.DOTALL)[1:]
    ]


async def checked(browser: Browser) -> str:
    """The words of the check's report, once it is over."""
    async with asyncio.timeout(60):
        while True:
            page = (await browser.get("/operator/check", headers=HTMX)).text
            if "hx-get" not in page:
                return text_of(page)
            await asyncio.sleep(0.1)


async def test_storage_is_counted_by_user_assistant_and_chat(
    browser: Browser, server: Server, store: ChunkStore
) -> None:
    server.engine.auto = "Yes."
    first, second = [await browser.new_chat(f"{n} very private words") for n in range(2)]
    async with server.browser() as other:
        third = await other.new_chat("of another user")
    for chat_id, stripes in ((first, 2), (second, 1), (third, 4)):
        save(store, f"c-{chat_id}", token_ids(1, 64 * stripes))
    save(store, "c-" + "0" * 32, token_ids(2, 64))
    assert store.flush(10)
    mib = 1 << 20

    chats = await rows(browser, "Largest chats")
    assert [row[0] for row in chats] == [one[:8] for one in (third, first, second)]
    assert [row[5] for row in chats] == [f"{n * STRIPE_BYTES / mib:.1f}" for n in (4, 2, 1)]
    assert {row[3] for row in chats} == {"2"}
    users = await rows(browser, "Users")
    assert sorted(row[2] for row in users) == ["1", "2"]
    assistants = await rows(browser, "Assistants")
    assert assistants[0][2] == "3"
    page = (await browser.get("/operator")).text
    outside = re.sub(r'<nav class="sidebar.*?</nav>', "", page, flags=re.DOTALL)
    assert "private words" not in outside
    words = text_of(page)
    assert f"Checkpoints{8 * STRIPE_BYTES / mib:.1f} of 8,192 MiB" in words
    assert f"Of no chat{STRIPE_BYTES / mib:.1f} MiB" in words
    assert "Messages in it6," in words


async def test_private_assistants_are_not_named(browser: Browser, server: Server) -> None:
    repository: Repository = server.app.state.repository
    await browser.new_chat()
    from sessions.assistant_records import AssistantDraft

    with closing(sqlite3.connect(server.app.state.services.settings.database_path)) as db:
        [(user_id,)] = db.execute("SELECT id FROM user").fetchall()
    draft = AssistantDraft(name="Secret plans", description="", greeting="", system_prompt="p")
    made = await repository.create_assistant(user_id, draft)
    names = [row[0] for row in await rows(browser, "Assistants")]
    assert f"Private, {made[:8]}" in names
    assert "Secret plans" not in names
    await repository.publish_assistant(made, True)
    assert "Secret plans" in [row[0] for row in await rows(browser, "Assistants")]


async def test_collection_drops_what_is_of_no_chat(
    browser: Browser, server: Server, store: ChunkStore
) -> None:
    chat_id = await browser.new_chat()
    for name in (f"c-{chat_id}", "c-" + "0" * 32, "p-prefix"):
        save(store, name, token_ids(1, 64))
    assert store.flush(10)
    await browser.get("/operator")
    done = await browser.post("/operator/collect")
    assert done.headers["location"] == "/operator?freed=0#storage", "this engine frees nothing"
    assert server.engine.collected == [["c-" + "0" * 32]]
    page = text_of((await browser.get("/operator?freed=5242880")).text)
    assert "5 MiB were freed." in page
    for given in ("-1", "x", "9" * 40, "1e3"):
        page = text_of((await browser.get(f"/operator?freed={given}")).text)
        assert "were freed" not in page
    server.engine.alive = False
    assert (await browser.post("/operator/collect")).status_code == 503
    assert "The engine does not answer at the moment." in text_of(
        (await browser.get("/operator")).text
    )


async def test_the_check_finds_damage_and_drops_it_when_told(
    browser: Browser, server: Server, store: ChunkStore, web_settings: Settings
) -> None:
    chat_id = await browser.new_chat()
    save(store, f"c-{chat_id}", token_ids(1, 128))
    assert store.flush(10)
    await browser.get("/operator")
    assert (await browser.post("/operator/check")).headers["location"] == "/operator#check"
    words = await checked(browser)
    assert "all is well" in words
    assert "database: 1 chats, 2 messages" in words
    assert "checkpoints: 1 chats and prefixes, 2 stripes" in words

    [path] = web_settings.chunk_dirs[0].glob("*.chunks")
    data = bytearray(path.read_bytes())
    data[STRIPE_BYTES - 4000] ^= 1
    path.write_bytes(data)
    began = await browser.post("/operator/check", htmx=True)
    assert "The check is running." in text_of(began.text)
    words = await checked(browser)
    assert "1 thing is wrong" in words
    assert f"wrong: checkpoints: c-{chat_id}: 1 of 2 stripes are damaged" in words
    assert server.engine.collected == [], "nothing is dropped unasked"
    await browser.post("/operator/check", {"repair": "1"})
    assert server.engine.collected == [[f"c-{chat_id}"]]
    store.forget([f"c-{chat_id}"])  # what an engine does then
    words = await checked(browser)
    assert f"put right: c-{chat_id} was dropped" in words


async def test_a_check_that_cannot_run_says_why(
    browser: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.operating.checks.COMMAND", ("false",))
    await browser.get("/operator")
    await browser.post("/operator/check")
    assert "The check failed: the check ended with code 1" in await checked(browser)


async def test_it_is_for_operators_alone(browser: Browser, server: Server) -> None:
    """Before there is an account whoever is at this machine is one."""
    await browser.new_chat()
    assert (await browser.get("/operator")).status_code == 200
    with closing(sqlite3.connect(server.app.state.services.settings.database_path)) as db:
        now = datetime.now(UTC).replace(tzinfo=None).isoformat(" ")
        db.execute(
            "INSERT INTO user (id, created_at, name, name_key, password_hash, is_operator) "
            "VALUES ('o', ?, 'op', 'op', 'x', 1)",
            (now,),
        )
        db.commit()
    for method, path in PATHS:
        ask = browser.get(path) if method == "GET" else browser.post(path)
        response = await ask
        assert response.status_code in (401, 403), (method, path)
        assert "Checkpoints" not in response.text
    assert server.engine.collected == []


async def test_ten_thousand_chats_are_quick(
    browser: Browser, server: Server, web_settings: Settings, fake_engine: FakeEngine
) -> None:
    """Server time of the page with 10,000 chats of 1,000 users, all with checkpoints."""
    await browser.new_chat()
    chats, users = 10_000, 1_000
    now = "2026-03-01 10:00:00.000000"
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        [(prefix_id,)] = db.execute("SELECT id FROM prefix").fetchall()
        db.executemany(
            "INSERT INTO user (id, created_at, is_operator) VALUES (?, ?, 0)",
            [(f"{n:032x}", now) for n in range(1, users + 1)],
        )
        db.executemany(
            "INSERT INTO login (id, user_id, token_hash, created_at, last_seen_at) "
            "VALUES (?, ?, ?, ?, ?)",
            [(f"{n:032x}", f"{n:032x}", f"h{n}", now, now) for n in range(1, users + 1)],
        )
        db.executemany(
            "INSERT INTO chat (id, user_id, prefix_id, title, created_at, updated_at) "
            "VALUES (?, ?, ?, 't', ?, ?)",
            [
                (f"{n:032x}", f"{n % users + 1:032x}", prefix_id, now, now)
                for n in range(1, chats + 1)
            ],
        )
        db.executemany(
            "INSERT INTO message (id, chat_id, role, text, token_ids, status, created_at) "
            "VALUES (?, ?, 'user', 'some words of a message', x'0100', 'running', ?)",
            [(f"{n:032x}", f"{n:032x}", now) for n in range(1, chats + 1)],
        )
        db.commit()
    directory = web_settings.chunk_dirs[0]
    ChunkStore(web_settings.chunk_dirs, 1 << 20).close()
    with closing(sqlite3.connect(directory / "index.sqlite3")) as db:
        db.executemany(
            "INSERT INTO owner (name, shared, used, file, size, live) VALUES (?, 0, 1, ?, 8192, 0)",
            [(f"c-{n:032x}", f"{n:032x}.chunks") for n in range(1, chats + 1)],
        )
        db.commit()
    times = []
    for _ in range(5):
        began = time.process_time()
        page = (await browser.get("/operator")).text
        times.append(time.process_time() - began)
    assert "10,001 chats" in page
    assert len(await rows(browser, "Largest chats")) == 25
    assert min(times) < 0.5, times

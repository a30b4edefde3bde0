"""A chat moved to its assistant's latest version, through the real server, engine and store (fp32).

The reference is transformers' own `generate` over the ids that the database then says.
"""

from __future__ import annotations

import asyncio
import sqlite3
from array import array
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from app.settings import Settings
from sessions.migrate import upgrade
from tests.app.fake_engine import FakeEngine
from tests.app.test_people_assistants import begin, change, make
from tests.app.web_client import Server, serving, settings_for
from tests.engine.harness import Oracle, make_tiny_model

pytestmark = pytest.mark.anyio

TOKENS = 10


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_kv_heads=2)


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path) -> Settings:
    upgrade(tmp_path / "rejoinder.db", tmp_path / "backups")
    return settings_for(
        tmp_path,
        tiny_model,
        dtype="fp32",
        kv_memory_mib=64,
        checkpoint_method="kv",
        share_prefix="always",
    )


def ids_of(settings: Settings, chat_id: str) -> tuple[list[int], list[list[int]]]:
    """The prefix's ids and those of each message, as they are stored."""

    def read(raw: bytes) -> list[int]:
        return array("i", raw).tolist()

    with closing(sqlite3.connect(settings.database_path)) as db:
        [(prefix,)] = db.execute(
            "SELECT p.token_ids FROM chat c JOIN prefix p ON p.id = c.prefix_id WHERE c.id = ?",
            (chat_id,),
        )
        messages = db.execute(
            "SELECT token_ids FROM message WHERE chat_id = ? ORDER BY rowid", (chat_id,)
        ).fetchall()
    return read(prefix), [read(ids) for (ids,) in messages]


async def at_rest(server: Server) -> None:
    async with asyncio.timeout(60):
        while server.app.state.services.hub.running():
            await asyncio.sleep(0.02)


async def test_the_answer_after_a_move_is_the_models_own(
    settings: Settings, tiny_model: Path
) -> None:
    oracle = Oracle(tiny_model)

    def check(chat_id: str) -> None:
        prefix, messages = ids_of(settings, chat_id)
        before = [token for ids in messages[:-1] for token in ids]
        assert messages[-1] == oracle.greedy(prefix + before, TOKENS)[: len(messages[-1])]
        assert messages[-1]

    engine = cast(FakeEngine, None)  # the application starts its own
    fields = {"temperature": "0", "max_tokens": str(TOKENS), "document_text": ["Some rules."]}
    async with serving(settings, engine) as server, server.browser() as browser:
        made = await make(browser, **fields)
        chat_id = await begin(browser, made, "A first question")
        await at_rest(server)
        check(chat_id)
        old_prefix, old_messages = ids_of(settings, chat_id)
        await change(browser, made, **fields, system_prompt="Other words, as many of them.")
        assert (await browser.post(f"/chats/{chat_id}/latest-version")).status_code == 303
        await browser.say(chat_id, "A second question")
        await at_rest(server)
        check(chat_id)
        new_prefix, messages = ids_of(settings, chat_id)
        assert new_prefix != old_prefix
        assert messages[: len(old_messages)] == old_messages
        [_, record] = await server.app.state.repository.chat_latency(chat_id)
        # All of it but the last sampled token, which had not been run before.
        assert record.latency.recomputed_tokens == sum(map(len, old_messages)) - 1
        cookies = browser.http.cookies
    async with serving(settings, engine) as server, server.browser() as browser:
        browser.http.cookies = cookies
        await browser.say(chat_id, "A third question")
        await at_rest(server)
        check(chat_id)
        record = (await server.app.state.repository.chat_latency(chat_id))[-1]
        assert record.latency.restored_tokens > sum(map(len, old_messages)), "the new state"

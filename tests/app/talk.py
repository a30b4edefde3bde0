"""What several tests do with a chat of the scripted engine."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from typing import Any

from app.settings import Settings
from tests.app.web_client import Browser, Server, text_of


def rows(settings: Settings, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(settings.database_path)) as db:
        return db.execute(query, values).fetchall()


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def ended(browser: Browser, chat_id: str) -> str:
    """The chat's page once nothing runs on it."""
    async with asyncio.timeout(5):
        while "hx-sse:connect" in (await browser.get(f"/chats/{chat_id}")).text:
            await asyncio.sleep(0.01)
    return browser.page


async def exchange(browser: Browser, server: Server, chat_id: str, text: str, said: str) -> None:
    """A message and its answer; "" begins the chat."""
    number = len(server.engine.turns)
    response = await browser.say(chat_id, text)
    assert response.status_code == 303, response.text
    turn = await server.engine.next_turn(number)
    turn.say(said)
    turn.end()
    await ended(browser, chat_id)


async def new_chat(browser: Browser, server: Server, text: str, said: str) -> str:
    """A chat of one exchange."""
    number = len(server.engine.turns)
    chat_id = await browser.new_chat(text)
    turn = await server.engine.next_turn(number)
    turn.say(said)
    turn.end()
    await ended(browser, chat_id)
    return chat_id


def messages(page: str) -> list[tuple[str, str, str]]:
    """Of the page: each message's id, its kind ("user" or "assistant"), and its text."""
    found = re.findall(
        r'<article class="message message--(\w+)[^"]*" id="message-([0-9a-f]{32})"(.*?)</article>',
        page,
        re.DOTALL,
    )
    made = []
    for kind, message_id, html in found:
        body = re.search(r'<div class="message__body[^>]*>(.*?)</div>', html, re.DOTALL)
        assert body is not None
        made.append((message_id, kind, text_of(body[1]).strip()))
    return made


def texts(page: str) -> list[str]:
    return [text for _, _, text in messages(page)]

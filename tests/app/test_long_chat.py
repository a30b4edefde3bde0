"""A chat of 300 messages of 300 tokens, code in every third one: the work to open it."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from app.rendering import FinishedHtml
from engine.turn_stream import Places
from tests.app.web_client import Browser, Server

pytestmark = pytest.mark.anyio

MESSAGES, TOKENS = 300, 300
PROSE = (
    "The keeper of the lighthouse **climbs** the stairs each evening, counts them, and lights the "
    "lamp; from its gallery one sees the coast, the [harbour](https://example.org/map) and ships. "
)
CODE = """```python
def restore(chat: str, *, method: str = "auto") -> int:
    # Counts the tokens that come back.
    return sum(len(part) for part in load(chat) if part is not None)


class Lamp:
    lit = False

    def light(self) -> None:
        self.lit = True
```
"""
LIMIT_S = 0.3
OWN_BYTES = 1_300  # of a message beside its text: names, buttons, the line under an answer


def text_of_message(number: int) -> str:
    """About 300 tokens."""
    parts = [f"Message {number}.", PROSE * 2, "- a point\n- another one\n- a third one"]
    parts += [CODE, PROSE] if number % 3 == 2 else [PROSE * 2, PROSE]
    return "\n\n".join(parts)


def copied(
    db: sqlite3.Connection, table: str, key: str, like: str, changes: dict[str, object]
) -> None:
    """Insert a copy of the row of `table` whose `key` is `like`, with some columns changed."""
    columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    [row] = db.execute(f"SELECT * FROM {table} WHERE {key} = ?", (like,)).fetchall()
    values: Sequence[object] = [changes.get(c, v) for c, v in zip(columns, row, strict=True)]
    db.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(columns))})", values)


def grow(path: Path, chat_id: str) -> None:
    """Give the chat, which has one exchange, all of its messages, each answer with its turn."""
    ids = np.full(TOKENS, 65, "<i4").tobytes()
    with closing(sqlite3.connect(path, timeout=30)) as db:
        rows = db.execute("SELECT id, role FROM message WHERE chat_id = ?", (chat_id,)).fetchall()
        models = {role: message_id for message_id, role in rows}
        [(turn_id,)] = db.execute("SELECT id FROM turn WHERE chat_id = ?", (chat_id,)).fetchall()
        parent = models["assistant"]
        for number in range(2, MESSAGES):
            role = ("user", "assistant")[number % 2]
            new = {"id": f"{number:032x}", "text": text_of_message(number), "token_ids": ids}
            copied(db, "message", "id", models[role], {**new, "parent_id": parent})
            parent = str(new["id"])
            if role == "assistant":
                turn = f"{number:031x}t"
                copied(db, "turn", "id", turn_id, {"id": turn, "message_id": parent})
                copied(db, "turn_latency", "turn_id", turn_id, {"turn_id": turn, "id": turn})
        db.execute("UPDATE chat SET active_leaf_id = ? WHERE id = ?", (parent, chat_id))
        db.commit()


async def test_a_long_chat_opens_fast_while_others_decode(browser: Browser, server: Server) -> None:
    server.engine.places = Places(9)
    chat_id = await browser.new_chat()
    turn = await server.engine.next_turn(0)
    turn.say("Yes.")
    turn.end()
    async with asyncio.timeout(5):
        while server.app.state.services.hub.of_chat(chat_id):
            await asyncio.sleep(0.01)
    grow(server.app.state.services.settings.database_path, chat_id)
    others = []
    for number in range(8):
        await browser.new_chat(f"Chat {number}")
        others.append(await server.engine.next_turn(number + 1))

    async def decode() -> None:
        while True:
            for other in others:
                other.say("word ")
            await asyncio.sleep(0.03)

    decoding = asyncio.create_task(decode())
    cpu = []
    for _ in range(4):
        began = time.process_time()
        page = await browser.get(f"/chats/{chat_id}")
        cpu.append(time.process_time() - began)
        assert page.text.count('class="message ') == MESSAGES
        assert page.text.count('class="code"') == MESSAGES // 6  # users' code stays text
    text = r'<div class="message__body.*?</div>\s*(?=<footer|<div class="message__tools|<label)'
    bare = re.sub(text, "", page.text, flags=re.DOTALL)
    assert "keeper of the lighthouse" not in bare, "what is left is not the messages' own"
    assert len(bare) < len((await browser.get("/")).text) + MESSAGES * OWN_BYTES
    decoding.cancel()
    for other in others:
        other.end()
    # Processor time: it does not grow when the machine is busy with other things.
    assert min(cpu[1:]) < LIMIT_S / 2, "what was rendered once is kept"
    assert cpu[0] < 2 * LIMIT_S, "every answer rendered; a quiet machine needs less than half"
    finished = server.app.state.services.finished
    await finished.close()
    rendered, finished.cache = finished.cache.num_rendered, FinishedHtml()
    began = time.process_time()
    again = await browser.get(f"/chats/{chat_id}")
    assert time.process_time() - began < LIMIT_S, "as after a restart: from the database"
    assert finished.cache.num_rendered == 0 < rendered
    assert again.text.count('class="code"') == MESSAGES // 6

"""The first signal lets answers finish and takes no new question; the second ends at once."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.drain import Drain
from app.engine_gate import EngineGate
from app.metrics import Metrics
from app.settings import Settings
from tests.app.api_client import chat_body, make_key, raw_client
from tests.app.fake_engine import FakeEngine
from tests.app.talk import new_chat
from tests.app.web_client import Browser, Server, text_of

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent.parent
# Says something, and ends its turns when a file appears.
SCRIPT = """
import asyncio
import sys
import uvicorn
from pathlib import Path
from app.main import create_app
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import settings_for

go = Path(sys.argv[1]) / "go"

class Engine(FakeEngine):
    def submit(self, turn, reservation):
        stream = super().submit(turn, reservation)
        made = self.turns[-1]
        made.say("Some")
        async def finish():
            while not go.exists():
                await asyncio.sleep(0.01)
            if not stream.ended:
                made.say(" and more.")
                made.end()
        self.task = asyncio.create_task(finish())
        return stream

    async def close(self):
        (Path(sys.argv[1]) / "flushed").touch()

settings = settings_for(Path(sys.argv[1]), Path(sys.argv[2]), drain_s=float(sys.argv[4]))
uvicorn.run(create_app(settings, engine=Engine()), port=int(sys.argv[3]), log_level="warning")
"""


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    browser: Browser
    settings: Settings

    async def draining(self) -> None:
        """SIGTERM, and the time until it was taken in."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (await self.browser.get("/readyz")).status_code != 503:
                await asyncio.sleep(0.01)

    async def ended(self, limit_s: float) -> None:
        await asyncio.to_thread(self.process.wait, limit_s)

    def answers(self) -> list[tuple[str, str]]:
        with closing(sqlite3.connect(self.settings.database_path)) as db:
            return db.execute(
                "SELECT status, text FROM message WHERE role = 'assistant' ORDER BY created_at"
            ).fetchall()


@asynccontextmanager
async def running(settings: Settings, port: int, drain_s: float) -> AsyncIterator[Running]:
    arguments = [str(settings.data_dir), settings.model, str(port), str(drain_s)]
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT)
    browser = Browser(f"http://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    await browser.get("/healthz")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
        yield Running(process, browser, settings)
    finally:
        await browser.http.aclose()
        process.kill()
        process.wait()


async def test_answers_finish_and_nothing_new_begins(
    web_settings: Settings, unused_port: int
) -> None:
    async with running(web_settings, unused_port, 60) as server:
        browser = server.browser
        chat_id = await browser.new_chat()
        async with browser.events(browser.turn_id) as events:
            await events.next()
            await server.draining()
            reason = (await browser.get("/readyz")).json()["reason"]
            assert reason == "the server is about to end"
            assert (await browser.get("/health")).status_code == 200
            await browser.get("/")
            refused = await browser.post("/chats", {"text": "Too late", "assistant_id": "x"})
            assert refused.status_code == 503
            assert 0 < int(refused.headers["retry-after"]) <= 70
            assert "The server is being restarted." in text_of(refused.text)
            assert "Too late" in refused.text, "the text is not lost"
            assert (await browser.get(f"/chats/{chat_id}")).status_code == 200
            (web_settings.data_dir / "go").touch()
            names = [name for name, _ in await events.rest()]
        assert names[-1] == "turn-end", "the stream ended as streams of finished turns do"
        await server.ended(8)
        assert server.answers() == [("complete", "Some and more.")]
        assert (web_settings.data_dir / "flushed").exists()


async def test_what_takes_longer_is_marked_interrupted(
    web_settings: Settings, unused_port: int
) -> None:
    async with running(web_settings, unused_port, 0.3) as server:
        await server.browser.new_chat()
        await server.draining()
        await server.ended(8)
        assert server.answers() == [("interrupted", "Some")]


async def test_a_second_signal_ends_it_at_once(web_settings: Settings, unused_port: int) -> None:
    async with running(web_settings, unused_port, 600) as server:
        await server.browser.new_chat()
        await server.draining()
        server.process.send_signal(signal.SIGTERM)
        await server.ended(5)
        assert server.answers() == [("interrupted", "Some")]


async def test_the_api_says_so_too(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "Hello", "An answer.")
    key = await make_key(server)
    server.app.state.services.gate.drain(20)
    async with raw_client(server, key) as client:
        response = await client.post("/chat/completions", json=chat_body())
    assert response.status_code == 503, response.text
    assert response.headers["retry-after"] == "20"
    assert response.json()["error"]["message"] == "The server is being restarted."
    refused = await browser.say(chat_id, "Too late", htmx=True)
    assert refused.status_code == 503
    assert "try again in 20 seconds; your text is still here." in text_of(refused.text).lower()
    assert len(server.engine.turns) == 1


async def test_a_flush_that_hangs_is_cut_short_by_a_second_signal() -> None:
    class Hangs(FakeEngine):
        ended = False

        async def close(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True

    engine = Hangs()
    drain = Drain(EngineGate(engine, Metrics()), limit_s=0.0)
    went_on = asyncio.Event()
    drain.signalled((), lambda: True, went_on.set)
    async with asyncio.timeout(5):
        await went_on.wait()
    closing_engine = asyncio.create_task(drain.close_engine())
    await asyncio.sleep(0.05)
    assert not closing_engine.done()
    drain.signalled((), lambda: True, went_on.set)
    async with asyncio.timeout(6):
        await closing_engine
    assert engine.ended

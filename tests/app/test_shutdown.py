"""A signal ends the server although somebody watches a running answer."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from app.settings import Settings
from tests.app.web_client import Browser

pytestmark = pytest.mark.anyio

SCRIPT = """
import sys
import uvicorn
from pathlib import Path
from app.main import create_app
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import settings_for

settings = settings_for(Path(sys.argv[1]), Path(sys.argv[2]), drain_s=0.2)
app = create_app(settings, engine=FakeEngine())
uvicorn.run(app, port=int(sys.argv[3]), log_level="warning")
"""
ROOT = Path(__file__).parent.parent.parent


async def test_sigterm_ends_streams_and_interrupts_turns(
    web_settings: Settings, unused_port: int
) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SCRIPT,
            str(web_settings.data_dir),
            web_settings.model,
            str(unused_port),
        ],
        cwd=ROOT,
    )
    try:
        browser = Browser(f"http://127.0.0.1:{unused_port}")
        async with asyncio.timeout(30):
            while True:
                try:
                    await browser.get("/health")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
        await browser.new_chat()
        async with browser.events(browser.turn_id) as events:
            await events.next()
            process.send_signal(signal.SIGTERM)
            assert "turn-end" not in [name for name, _ in await events.rest()]
        await browser.http.aclose()
        # Well below the time after which the server cuts connections by force.
        await asyncio.to_thread(process.wait, 5)
    finally:
        process.kill()
        process.wait()
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        statuses = db.execute("SELECT status FROM message WHERE role = 'assistant'").fetchall()
    assert statuses == [("interrupted",)]

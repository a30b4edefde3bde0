"""Debian's nginx with the documented configuration: answers arrive as they are written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.settings import Settings
from tests.app.account_support import invited, quick_passwords
from tests.app.api_client import chat_body, make_key
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import Browser, Server, serving

__all__ = ["quick_passwords"]

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)"),
]
DOCS = Path(__file__).parents[2] / "docs"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def documented(port: int, server_port: int) -> str:
    """docs/nginx.conf without what needs a certificate and a name of its own."""
    text = (DOCS / "nginx.conf").read_text()
    text, number = re.subn(r"server \{\s+listen 80;.*?\n\}\n", "", text, flags=re.DOTALL)
    assert number == 1
    for pattern, other in (
        (r"server 127\.0\.0\.1:8000;", f"server 127.0.0.1:{server_port};"),
        (r"listen 443 ssl http2;.*", f"listen 127.0.0.1:{port};"),
        (r"ssl_certificate(_key)? .*", ""),
        (r"include /etc/nginx/rejoinder-locations.conf;", f"include {DOCS}/nginx-locations.conf;"),
    ):
        text, number = re.subn(pattern, other, text)
        assert number, pattern
    return text


@dataclass
class Proxied:
    server: Server
    url: str


@pytest.fixture
async def proxied(
    web_settings: Settings, fake_engine: FakeEngine, tmp_path: Path
) -> AsyncIterator[Proxied]:
    port = free_port()
    settings = web_settings.model_copy(update={"public_url": f"http://127.0.0.1:{port}"})
    async with serving(settings, fake_engine) as server:
        config = tmp_path / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        config.write_text(
            f"""{user} daemon off; worker_processes 1; pid {tmp_path}/nginx.pid;
            error_log {tmp_path}/error.log;
            events {{}}
            http {{
                access_log off;
                # Whatever the machine's own defaults do to other sites:
                gzip on; gzip_types *; gzip_min_length 0; gzip_proxied any;
                client_body_temp_path {tmp_path}; proxy_temp_path {tmp_path};
                fastcgi_temp_path {tmp_path}; uwsgi_temp_path {tmp_path};
                scgi_temp_path {tmp_path};
                {documented(port, int(server.url.rpartition(":")[2]))}
            }}"""
        )
        process = subprocess.Popen([str(NGINX), "-p", str(tmp_path), "-c", str(config)])
        try:
            async with asyncio.timeout(10):
                while True:
                    with closing(socket.socket()) as probe:
                        if probe.connect_ex(("127.0.0.1", port)) == 0:
                            break
                    assert process.poll() is None, (tmp_path / "error.log").read_text()
                    await asyncio.sleep(0.02)
            yield Proxied(server, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(10)


async def test_a_browser_sees_each_piece_before_the_next_is_written(
    proxied: Proxied, fake_engine: FakeEngine
) -> None:
    async with Browser(proxied.url) as browser:
        await invited(proxied.server, browser, "Ada")
        await browser.new_chat()
        turn = await fake_engine.next_turn(0)
        async with browser.events(browser.turn_id) as events:
            headers = events.response.headers
            assert "content-encoding" not in headers
            assert headers["content-type"].startswith("text/event-stream")
            await events.next()
            for number in range(5):
                turn.say(f"piece{number} ")
                while f"piece{number}" not in (await events.next())[1]:
                    pass  # a status, or a sign of life
            turn.end()
            names = [name for name, _ in await events.rest()]
        assert names[-1] == "turn-end"
        plain = await browser.get("/")
        assert plain.status_code == 200


async def test_a_client_of_the_api_too(proxied: Proxied, fake_engine: FakeEngine) -> None:
    key = await make_key(proxied.server)
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx.AsyncClient(base_url=proxied.url, headers=headers, timeout=10) as client,
        client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response,
    ):
        assert response.status_code == 200
        assert "content-encoding" not in response.headers
        lines = response.aiter_lines()
        turn = await fake_engine.next_turn(0)
        for number in range(5):
            turn.say(f"piece{number} ")
            async with asyncio.timeout(5):
                async for line in lines:
                    if f"piece{number}" in line:
                        assert json.loads(line.removeprefix("data: "))["choices"]
                        break
        turn.end()
        rest = [line async for line in lines]
    assert "data: [DONE]" in rest


async def test_a_client_that_leaves_is_noticed_behind_the_proxy(
    proxied: Proxied, fake_engine: FakeEngine
) -> None:
    key = await make_key(proxied.server)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=proxied.url, headers=headers, timeout=10) as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)):
            turn = await fake_engine.next_turn(0)
            turn.say("Some")
        async with asyncio.timeout(5):
            while not fake_engine.cancelled:
                await asyncio.sleep(0.01)


async def test_figures_and_health_stay_inside(proxied: Proxied) -> None:
    async with httpx.AsyncClient(base_url=proxied.url) as client:
        for path in ("/metrics", "/health", "/healthz"):
            assert (await client.get(path)).status_code == 403, path
        assert (await client.get("/readyz")).status_code == 200
        page = await client.get("/sign-in")
        assert page.status_code == 200
        assert "content-encoding" not in page.headers

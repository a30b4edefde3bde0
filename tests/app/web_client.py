"""The real application behind a real HTTP server, and the bare essentials of a browser."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from litestar import Litestar

from app.main import create_app
from app.settings import Settings
from tests.app.fake_engine import FakeEngine

HTMX = {"HX-Request": "true", "HX-Request-Type": "partial"}


@dataclass
class Server:
    """One running server."""

    app: Litestar
    engine: FakeEngine
    url: str

    def browser(self) -> Browser:
        return Browser(self.url)


@asynccontextmanager
async def serving(settings: Settings, engine: FakeEngine) -> AsyncIterator[Server]:
    """Serve the application; leaving ends it as a signal would."""
    app = create_app(settings, engine=engine)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_config=None, timeout_graceful_shutdown=5, lifespan="on", proxy_headers=False
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            task.result()
            raise RuntimeError("the server ended at its start")
        await asyncio.sleep(0.005)
    try:
        yield Server(app, engine, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        app.state.services.hub.end_streams()
        server.should_exit = True
        await task
        listener.close()


class Browser:
    """A browser without scripts: cookies, the CSRF field of its last page, form posts."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=10)
        self.page = ""

    async def __aenter__(self) -> Browser:
        await self.get("/")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.http.aclose()

    async def get(self, path: str, **options: Any) -> httpx.Response:
        response = await self.http.get(path, **options)
        if "_csrf_token" in response.text:
            self.page = response.text
        return response

    async def post(
        self, path: str, fields: dict[str, str] | None = None, *, htmx: bool = False
    ) -> httpx.Response:
        token = field(self.page, "_csrf_token")
        return await self.http.post(
            path, data={"_csrf_token": token, **(fields or {})}, headers=HTMX if htmx else {}
        )

    async def new_chat(self, text: str = "Hello") -> str:
        """Begin a chat by the form of the first page; returns the chat's id."""
        await self.get("/")
        fields = {"text": text, "assistant_id": field(self.page, "assistant_id")}
        response = await self.post("/chats", fields)
        assert response.status_code == 303, response.text
        location = response.headers["location"]
        await self.get(location)
        return str(location.removeprefix("/chats/"))

    async def say(self, chat_id: str, text: str, *, htmx: bool = False) -> httpx.Response:
        """Send a message by the form of the chat's page."""
        await self.get(f"/chats/{chat_id}")
        fields = {"text": text, "parent_id": field(self.page, "parent_id")}
        return await self.post(f"/chats/{chat_id}/messages", fields, htmx=htmx)

    @property
    def turn_id(self) -> str:
        """Of the answer that runs on the page."""
        found = re.search(r'hx-sse:connect="/turns/([0-9a-f]{32})/events"', self.page)
        assert found is not None, self.page
        return found[1]

    @asynccontextmanager
    async def events(self, turn_id: str) -> AsyncIterator[Events]:
        async with self.http.stream("GET", f"/turns/{turn_id}/events") as response:
            yield Events(response)


class Events:
    """The events of one stream as (name, data); comments have the name ":"."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self) -> tuple[str, str]:
        name = ""
        data: list[str] = []
        async with asyncio.timeout(5):
            async for line in self._lines:
                if not line:
                    return name, "\n".join(data)
                if line.startswith(":"):
                    name = ":"
                elif line.startswith("event: "):
                    name = line.removeprefix("event: ")
                else:
                    assert line.startswith("data: "), line
                    data.append(line.removeprefix("data: "))
        raise StopAsyncIteration

    async def rest(self) -> list[tuple[str, str]]:
        """All events up to the end of the stream."""
        found = []
        while True:
            try:
                found.append(await self.next())
            except StopAsyncIteration:
                return found


def field(page: str, name: str) -> str:
    """The value of the first form field with this name."""
    found = re.search(rf'name="{name}" value="([^"]*)"', page)
    assert found is not None, f"no field {name} in {page}"
    return unescape(found[1])


def partials(event: str) -> dict[str, tuple[str, str]]:
    """The `<hx-partial>` elements of an event: target to (swap, HTML)."""
    found = re.findall(
        r'<hx-partial hx-target="([^"]+)" hx-swap="([^"]+)">(.*?)</hx-partial>', event, re.DOTALL
    )
    return {target: (swap, html) for target, swap, html in found}


def text_of(html: str) -> str:
    """What a person reads of a piece of HTML."""
    return unescape(re.sub(r"<[^>]+>", "", html))


def settings_for(data_dir: Path, model_dir: Path, **changes: Any) -> Settings:
    return Settings(data_dir=data_dir, model=str(model_dir), **changes)

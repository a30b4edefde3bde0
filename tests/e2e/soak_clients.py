"""People who talk, stop, leave, come back, edit and branch over real HTTP, by a seed."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from tests.app.web_client import Browser
from tests.app.web_client import field as form_field

WORDS = ["river", "castle", "why", "lantern", "seven", "harbour", "quiet", "bridge", "copper"]
WORDS += ["winter", "garden", "maps", "when", "orchard", "signal", "basket", "island", "who"]
REQUEST_S = 90.0  # for any one answer of the server, on a machine that is busy
CALM = {200, 201, 204, 303}
# a running answer, another tab, a full context, a full queue, an engine that is started again
REFUSED = {409, 413, 429, 503}
MAX_CHATS = 3
CONTEXT_TOKENS = 4096


@dataclass
class World:
    """What all clients share: where the server is, what it acknowledged, what went wrong."""

    url: str
    up: asyncio.Event
    ends_at: float = 0.0
    killed_at: float = 0.0
    said: dict[str, list[str]] = field(default_factory=dict)  # chat -> texts acknowledged
    deleted: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)  # messages whose end somebody saw
    counts: Counter[str] = field(default_factory=Counter)
    trouble: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return asyncio.get_running_loop().time() >= self.ends_at


class Gone(Exception):
    """The chat's page cannot be had."""


class Person:
    """One browser with a few chats. Does one thing after another until the soak is over."""

    def __init__(self, world: World, seed: int, assistants: list[str]) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._assistants = assistants
        self._browser = Browser(world.url)
        self._browser.http.timeout = httpx.Timeout(REQUEST_S)
        self._chats: list[str] = []

    async def live(self) -> None:
        """Until the end; a server that is down is waited for, anything else is trouble."""
        actions: list[tuple[Callable[[str], Awaitable[None]], int]] = [
            (self._say, 10),
            (self._edit, 2),
            (self._again, 2),
            (self._go_on, 2),
            (self._branch, 2),
            (self._warm, 1),
            (self._reload, 1),
            (self._delete, 1),
        ]
        choices = [action for action, weight in actions for _ in range(weight)]
        await asyncio.sleep(self._random.uniform(0, 2))
        while not self._world.over:
            await self._world.up.wait()
            try:
                if not self._chats or (
                    len(self._chats) < MAX_CHATS and self._random.random() < 0.2
                ):
                    await self._begin()
                else:
                    await self._random.choice(choices)(self._random.choice(self._chats))
            except httpx.TransportError as error:
                self._lost(error)
                await asyncio.sleep(0.2)
            except Gone:
                self._world.counts["gone"] += 1
            except TimeoutError:
                self._world.trouble.append("a stream said nothing for too long")
            await asyncio.sleep(self._random.expovariate(2.0))
        await self._browser.http.aclose()

    def _lost(self, error: Exception) -> None:
        """A connection that broke: expected only around a kill."""
        now = asyncio.get_running_loop().time()
        self._world.counts["connection lost"] += 1
        if self._world.up.is_set() and now - self._world.killed_at > 5.0:
            self._world.trouble.append(f"a connection broke: {type(error).__name__}: {error}")

    # -- what people do ------------------------------------------------------------------------

    async def _begin(self) -> None:
        await self._browser.get("/")
        text = self._text()
        fields = {"text": text, "assistant_id": self._random.choice(self._assistants)}
        response = await self._browser.post("/chats", fields)
        if self._accepted("new chat", response):
            chat = response.headers["location"].removeprefix("/chats/").split("#")[0]
            self._chats.append(chat)
            self._world.said.setdefault(chat, []).append(text)
            await self._watch(chat)

    async def _say(self, chat: str) -> None:
        await self._page(chat)
        if 'name="parent_id"' not in self._browser.page:
            return
        text = self._text()
        fields = {"text": text, "parent_id": form_field(self._browser.page, "parent_id")}
        response = await self._browser.post(f"/chats/{chat}/messages", fields)
        if self._accepted("message", response):
            self._world.counts["queued"] += "#composer" in response.headers["location"]
            self._world.said[chat].append(text)
            await self._watch(chat)
        elif response.status_code == 413:
            self._chats.remove(chat)

    async def _edit(self, chat: str) -> None:
        await self._page(chat)
        forms = re.findall(r'href="(/messages/[0-9a-f]+/edit)"', self._browser.page)
        if not forms:
            return
        path, text = self._random.choice(forms), self._text()
        if self._accepted("edit", await self._browser.post(path, {"edited": text})):
            self._world.said[chat].append(text)
            await self._watch(chat)

    async def _again(self, chat: str) -> None:
        number = self._random.choice(["1", "1", "2", "3"])
        if await self._press(chat, "again", {"answers": number}):
            await self._watch(chat)

    async def _go_on(self, chat: str) -> None:
        kind = self._random.choice(["continue", "retry"])
        if await self._press(chat, kind, {}):
            await self._watch(chat)

    async def _branch(self, chat: str) -> None:
        await self._press(chat, "select", {})

    async def _warm(self, chat: str) -> None:
        await self._page(chat)
        self._accepted("warm", await self._browser.post(f"/chats/{chat}/warm"))

    async def _reload(self, chat: str) -> None:
        await self._page(chat)

    async def _delete(self, chat: str) -> None:
        if self._random.random() < 0.5:
            return
        await self._page(chat)
        self._world.deleted.add(chat)  # also when the server is killed before it says so
        if self._accepted("delete", await self._browser.post(f"/chats/{chat}/delete")):
            self._chats.remove(chat)

    # -- the means -----------------------------------------------------------------------------

    async def _page(self, chat: str) -> None:
        response = await self._browser.get(f"/chats/{chat}")
        if response.status_code == 404 and chat in self._world.deleted:
            if chat in self._chats:
                self._chats.remove(chat)
            raise Gone
        if not self._accepted("page", response):
            raise Gone

    async def _press(self, chat: str, kind: str, fields: dict[str, str]) -> bool:
        """Press one of the page's buttons of this kind; False when there is none."""
        await self._page(chat)
        found = re.findall(rf'formaction="(/messages/[0-9a-f]+/{kind})"', self._browser.page)
        if not found:
            return False
        path = self._random.choice(found)
        if kind == "continue":  # it runs again, and the next kill may cut it off
            self._world.ended.discard(path.split("/")[2])
        return self._accepted(kind, await self._browser.post(path, fields))

    async def _watch(self, chat: str) -> None:
        """Look on for a while, or to the end; leave, stop, or come back in between."""
        mood = self._random.random()
        if mood < 0.15:
            return
        await self._page(chat)
        turns = re.findall(r'data-turn-id="([0-9a-f]{32})"', self._browser.page)
        messages = re.findall(r'id="message-([0-9a-f]{32})"[^>]*data-turn-id="', self._browser.page)
        if not turns:
            return
        if mood < 0.3:
            await asyncio.sleep(self._random.uniform(0, 0.5))
            response = await self._browser.post(f"/turns/{turns[0]}/stop")
            self._accepted("stop", response)
            return
        single = len(turns) == 1
        stream = f"/turns/{turns[0]}/" + ("events" if single else "candidates")
        events = self._random.randrange(1, 6) if mood < 0.55 else None
        if await self._follow(stream, events):
            self._world.ended.update(messages)
        elif events is not None and self._random.random() < 0.5:
            self._world.counts["came back"] += 1
            if await self._follow(stream, None):
                self._world.ended.update(messages)

    async def _follow(self, path: str, events: int | None) -> bool:
        """Read a stream to its end, or leave after so many events; True when it ended itself."""
        seen = 0
        ended = False
        async with self._browser.http.stream("GET", path) as response:
            if response.status_code != 200:
                await response.aread()
                self._accepted("stream", response)
                return False
            lines = response.aiter_lines()
            async with asyncio.timeout(REQUEST_S):
                async for line in lines:
                    ended = ended or line == "event: turn-end"
                    seen += not line
                    if events is not None and seen >= events and not ended:
                        self._world.counts["left mid-stream"] += 1
                        return False
        self._world.counts["watched to the end"] += ended
        return ended

    def _accepted(self, what: str, response: httpx.Response) -> bool:
        status = response.status_code
        self._world.counts[what if status in CALM else f"{what} {status}"] += 1
        if status not in CALM | REFUSED:
            self._world.trouble.append(f"{what}: {status} {response.text[-300:]!r}")
        return status in CALM

    def _text(self) -> str:
        count = self._random.choice([2, 4, 8, 16, 40])
        return " ".join(self._random.choices(WORDS, k=count)) + f" {self._random.random()}"

"""Every route, tried with no login, another's, a revoked one, a guest's: no data of others."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

import httpx
import pytest

from app.security.login import hash_token
from app.settings import Settings
from sessions.assistant_records import AssistantDraft
from tests.app.account_support import cookie, invited, quick_passwords, sign_in
from tests.app.api_client import chat_body, make_key, raw_client
from tests.app.fake_engine import FakeEngine
from tests.app.route_kinds import (
    ACCOUNT,
    ALL,
    OF_OWNER,
    OPEN,
    OPERATOR,
    OWN,
    Route,
    api_routes,
    browser_routes,
)
from tests.app.web_client import HTMX, Browser, Server, serving

__all__ = ["quick_passwords"]

pytestmark = pytest.mark.anyio

SECRET = "what only Ada may read"
FIELDS = {"text": "mine now", "title": "mine now", "parent_id": "", "name": "mine now"}


@dataclass
class World:
    """A server that needs accounts; Ada, its operator Olga, and what belongs to Ada."""

    server: Server
    settings: Settings
    ada: Browser
    ids: dict[str, str]

    def path(self, route: Route) -> str:
        return route[1].format(**self.ids)

    def rows(self) -> list[tuple[object, ...]]:
        """Everything of Ada's that a stranger might change."""
        with closing(sqlite3.connect(self.settings.database_path)) as db:
            [(ada,)] = db.execute("SELECT id FROM user WHERE name = 'Ada'").fetchall()
            found = []
            for query in (
                "SELECT * FROM user WHERE id = ?",
                "SELECT id, revoked_at FROM login WHERE user_id = ?",
                "SELECT * FROM api_key WHERE user_id = ?",
                "SELECT * FROM chat WHERE user_id = ? ORDER BY id",
                "SELECT message.* FROM message JOIN chat ON chat.id = chat_id WHERE user_id = ?",
                "SELECT id, owner_id, published, name FROM assistant WHERE owner_id = ?",
            ):
                found += db.execute(query, (ada,)).fetchall()
            return found + db.execute("SELECT id, used_at FROM account_link").fetchall()

    def is_clean(self, response: httpx.Response, known: str = "") -> bool:
        """Whether a response says nothing of Ada's; ids that the request named are no news."""
        private = [SECRET, "Ada", *(one for one in self.ids.values() if one not in known)]
        return not any(one in response.text for one in private)


@pytest.fixture
async def world(web_settings: Settings, fake_engine: FakeEngine) -> AsyncIterator[World]:
    settings = web_settings.model_copy(update={"public_url": "http://chat.test"})
    async with serving(settings, fake_engine) as server:
        ada = server.browser()
        await invited(server, ada, "Ada")
        repository = server.app.state.repository
        user = await repository.user_by_name("ada")
        chat_id = await ada.new_chat(SECRET)
        running_id = ada.turn_id
        with closing(sqlite3.connect(settings.database_path)) as db:
            [(turn_id, message_id)] = db.execute("SELECT id, message_id FROM turn").fetchall()
        assert turn_id == running_id
        await make_key(server, user_id=user.id)
        [key] = await repository.valid_api_keys(user.id)
        [login] = await repository.logins(user.id)
        draft = AssistantDraft(name=SECRET, description="", greeting="", system_prompt=SECRET)
        link = await repository.create_link("a hash", lasts=timedelta(days=1))
        ids = {
            "chat_id": chat_id,
            "turn_id": turn_id,
            "message_id": message_id,
            "job_id": turn_id,
            "key_id": key.id,
            "login_id": login.id,
            "user_id": user.id,
            "link_id": link.id,
            "assistant_id": await repository.create_assistant(user.id, draft),
            "token": "a" * 43,
        }
        yield World(server, settings, ada, ids)
        await ada.http.aclose()


async def test_every_route_says_who_may_use_it(world: World) -> None:
    assert browser_routes(world.server.app) == ALL
    kinds = (OPEN, OWN, ACCOUNT, OF_OWNER, OPERATOR)
    assert sum(len(kind) for kind in kinds) == len(ALL)


async def ask(
    world: World, browser: Browser, route: Route, headers: dict[str, str]
) -> httpx.Response:
    if route[0] == "GET":
        return await browser.http.get(world.path(route), headers=headers)
    token = browser.page.partition('name="_csrf_token" value="')[2].partition('"')[0]
    fields = {"_csrf_token": token, **FIELDS}
    return await browser.http.post(world.path(route), data=fields, headers=headers)


@pytest.mark.parametrize("who", ["nobody", "revoked", "guest", "disabled"])
async def test_without_an_account_nothing_is_open(world: World, who: str) -> None:
    repository = world.server.app.state.repository
    async with world.server.browser() as browser:
        if who == "guest":  # of the time before the server had a public address
            await repository.create_user(hash_token("g" * 43))
            browser.http.cookies.set("rejoinder_login", "g" * 43)
        elif who != "nobody":
            await invited(world.server, browser, "Bob")
            kept = cookie(browser)
            bob = await repository.user_by_name("bob")
            if who == "revoked":
                await repository.end_logins(bob.id)
            else:
                await repository.disable_user(bob.id)
            assert cookie(browser) == kept
        await browser.get("/sign-in")
        before = world.rows()
        for route in sorted(ALL - OPEN):
            plain = await ask(world, browser, route, {})
            metrics = route[1] == "/metrics"
            if metrics:  # programs ask with a key
                assert plain.status_code == 401
            else:
                assert plain.status_code in (303, 401), route
            if plain.status_code == 303:
                assert plain.headers["location"].startswith("/sign-in"), route
            else:
                assert (
                    plain.headers["content-type"].startswith(("text/plain", "application/json"))
                    or metrics
                )
            assert world.is_clean(plain), route
            if who != "nobody":  # the other forms of the answer are the same
                continue
            part = await ask(world, browser, route, HTMX | {"HX-Current-URL": "http://h/chats/1"})
            assert part.status_code == 401, route
            if not metrics and route[0] == "GET":
                assert part.headers["hx-redirect"] == "/sign-in?next_path=%2Fchats%2F1"
            elif route[0] == "POST":
                assert "hx-redirect" not in part.headers
                assert "What you wrote is still here" in part.text
            stream = await ask(world, browser, route, {"Accept": "text/html, text/event-stream"})
            assert stream.status_code == 401, route
            script = await ask(world, browser, route, {"Sec-Fetch-Mode": "cors"})
            assert script.status_code == 401, route
        assert world.rows() == before
        assert world.server.engine.warmed == []
        assert world.server.engine.cancelled == []
        for route in sorted(OPEN - {("POST", "/sign-out")}):
            answer = await ask(world, browser, route, {})
            assert answer.status_code in (200, 204, 401, 410), route
            assert world.is_clean(answer), route


@pytest.mark.parametrize("operator", [False, True], ids=["member", "operator"])
async def test_another_account_finds_nothing_of_ada(world: World, operator: bool) -> None:
    async with world.server.browser() as bob:
        await invited(world.server, bob, "Bob", operator=operator)
        before = world.rows()
        own = await bob.new_chat("Bob's own")
        for route in sorted(OF_OWNER):
            for headers in ({}, HTMX):
                refused = await ask(world, bob, route, headers)
                allowed = (403, 404) if "assistant" in route[1] else (404,)
                assert refused.status_code in allowed, route
                assert world.is_clean(refused, world.path(route)), route
        if not operator:
            for route in sorted(OPERATOR):
                for headers in ({}, HTMX):
                    refused = await ask(world, bob, route, headers)
                    assert refused.status_code == 403, route
                    assert world.is_clean(refused, world.path(route)), route
        assert world.rows() == before
        assert world.ids["turn_id"] not in world.server.engine.cancelled
        paths = {path for method, path in OWN | ACCOUNT if method == "GET"}
        for path in sorted(paths | {"/search?q=only"}):
            page = await bob.get(path)
            assert page.status_code == 200, path
            assert world.is_clean(page), path
        for path in ("/history/export/json", "/history/export/markdown"):
            assert world.is_clean(await bob.get(path))
        assert own in (await bob.get("/")).text
        await bob.get("/account")
        for route in sorted(r for r in OWN | ACCOUNT if r[0] == "POST" and "delete" not in r[1]):
            if route[1] == "/account/sign-out-everywhere":
                continue
            assert world.is_clean(await ask(world, bob, route, {})), route
        assert world.rows() == before


async def test_a_login_that_ends_is_worth_nothing_the_moment_after(world: World) -> None:
    chat = f"/chats/{world.ids['chat_id']}"
    assert SECRET in (await world.ada.get(chat)).text
    async with world.server.browser() as elsewhere:
        await sign_in(elsewhere, "Ada")
        assert SECRET in (await elsewhere.get(chat)).text
        await world.ada.get("/account")
        stolen = cookie(elsewhere)
        await elsewhere.get("/account")
        left = await elsewhere.post("/sign-out")
        assert left.headers["location"] == "/sign-in"
        elsewhere.http.cookies.set("rejoinder_login", stolen or "")
        refused = await elsewhere.get(chat)
        assert (refused.status_code, SECRET in refused.text) == (303, False)
    assert SECRET in (await world.ada.get(chat)).text


async def test_the_api_answers_to_its_keys_alone(world: World) -> None:
    server, repository = world.server, world.server.app.state.repository
    ada_key = await make_key(server, user_id=world.ids["user_id"])
    async with raw_client(server, ada_key) as client:
        made = (await client.post("/conversations", json={"metadata": {"who": SECRET}})).json()
    ids = world.ids | {"conversation_id": made["id"], "item_id": "msg_1", "response_id": "resp_1"}
    bob_key = await make_key(server)
    revoked_key = await make_key(server, user_id=world.ids["user_id"])
    for key in await repository.valid_api_keys(world.ids["user_id"]):
        if key.hint == revoked_key[-4:]:
            await repository.revoke_api_key(key.id)
    routes = sorted(api_routes(server.app))
    assert len(routes) >= 15
    for key, signed_in in ((None, True), (None, False), (revoked_key, False), ("rj-x", False)):
        async with raw_client(server, key) as client:
            if signed_in:  # a browser's login opens nothing here
                client.cookies.set("rejoinder_login", cookie(world.ada) or "")
            for method, path in routes:
                if path == "/v1/openapi.json":
                    continue
                address = (
                    path.removeprefix("/v1").replace("{name}", "x").replace("{name:path}", "x")
                )
                body = None if method == "GET" else chat_body()
                refused = await client.request(method, address.format(**ids), json=body)
                assert refused.status_code == 401, (method, path)
                assert world.is_clean(refused)
    async with raw_client(server, bob_key) as client:
        for method, path in routes:
            if "_id}" not in path:
                continue
            body = None if method in ("GET", "DELETE") else {"metadata": {}, "items": []}
            refused = await client.request(
                method, path.removeprefix("/v1").format(**ids), json=body
            )
            assert refused.status_code in (400, 404), (method, path)
            assert world.is_clean(refused, made["id"])
    async with raw_client(server, ada_key) as client:
        assert (await client.get(f"/conversations/{made['id']}")).json()["metadata"] == {
            "who": SECRET
        }
        await repository.disable_user(world.ids["user_id"])
        assert (await client.get("/models")).status_code == 401


async def test_figures_are_for_operators_and_their_keys(world: World) -> None:
    server, repository = world.server, world.server.app.state.repository
    async with server.browser() as olga:
        await invited(server, olga, "Olga", operator=True)
        for route in sorted(r for r in OPERATOR if r[0] == "GET"):
            answer = await ask(world, olga, route, {})
            assert answer.status_code in (200, 303), route
            assert "sign-in" not in answer.headers.get("location", "")
    operator = await repository.user_by_name("olga")
    async with httpx.AsyncClient(base_url=server.url) as program:
        keys = {200: await make_key(server, user_id=operator.id), 403: await make_key(server)}
        for status, key in keys.items():
            headers = {"Authorization": f"Bearer {key}"}
            assert (await program.get("/metrics", headers=headers)).status_code == status
        assert (
            await program.get("/metrics", headers={"Authorization": "Bearer x"})
        ).status_code == 401
        assert (await program.get("/metrics")).status_code == 401

"""What operators do: invite, take back, disable, let in again, send a new password."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from app.settings import Settings
from tests.app.account_support import PASSWORD, invited, quick_passwords, sign_in
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import Browser, Server, serving, text_of

__all__ = ["quick_passwords"]

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server(web_settings: Settings, fake_engine: FakeEngine) -> AsyncIterator[Server]:
    settings = web_settings.model_copy(update={"public_url": "http://chat.test:8080"})
    async with serving(settings, fake_engine) as running:
        yield running


@pytest.fixture
async def olga(server: Server) -> AsyncIterator[Browser]:
    async with server.browser() as browser:
        await invited(server, browser, "Olga", operator=True)
        yield browser


async def made_link(browser: Browser, **fields: str) -> str:
    await browser.get("/people")
    page = (await browser.post("/people/invitations", fields)).text
    found = re.search(
        r'id="made-link">http://chat\.test:8080(/invitations/[A-Za-z0-9_-]{43})<', page
    )
    assert found is not None, page
    return found[1]


async def test_an_invitation_makes_one_account(server: Server, olga: Browser) -> None:
    path = await made_link(olga, days="7")
    assert path not in (await olga.get("/people")).text, "it is shown once"
    async with server.browser() as ada, server.browser() as eve:
        assert "Choose a name" in text_of((await ada.get(path)).text)
        await eve.get(path)
        made = await ada.post(path, {"name": "Ada", "password": PASSWORD})
        assert (made.status_code, made.headers["location"]) == (303, "/")
        assert (await ada.get("/")).status_code == 200
        assert (await ada.get("/people")).status_code == 403
        late = await eve.post(path, {"name": "Eve", "password": PASSWORD})
        assert late.status_code == 410
        assert "not valid any more" in late.text
        assert (await eve.get(path)).status_code == 410
    page = text_of((await olga.get("/people")).text)
    assert "Ada" in page
    assert "Eve" not in page


async def test_a_name_that_is_taken_does_not_use_the_invitation_up(
    server: Server, olga: Browser
) -> None:
    path = await made_link(olga, days="1", for_operator="1")
    async with server.browser() as ada:
        assert "operator" in text_of((await ada.get(path)).text)
        taken = await ada.post(path, {"name": "OLGA", "password": PASSWORD})
        assert taken.status_code == 409
        assert (await ada.post(path, {"name": "Ada", "password": "short"})).status_code == 400
        assert (await ada.post(path, {"name": "Ada", "password": PASSWORD})).status_code == 303
        assert (await ada.get("/people")).status_code == 200


async def test_an_invitation_is_taken_back(server: Server, olga: Browser) -> None:
    path = await made_link(olga)
    page = (await olga.get("/people")).text
    end = re.search(r'action="(/people/invitations/[0-9a-f]{32}/end)"', page)
    assert end is not None
    assert (await olga.post(end[1])).status_code == 303
    assert (await olga.post(end[1])).status_code == 404
    async with server.browser() as ada:
        assert (await ada.get(path)).status_code == 410


async def test_somebody_is_disabled_and_comes_back_with_a_new_password(
    server: Server, olga: Browser
) -> None:
    async with server.browser() as ada:
        await invited(server, ada, "Ada")
        user = await server.app.state.repository.user_by_name("ada")
        await olga.get("/people")
        assert (await olga.post(f"/people/{user.id}/disable")).status_code == 303
        assert (await ada.get("/")).headers["location"] == "/sign-in"
        assert (await sign_in(ada, "Ada")).status_code == 401
        await olga.get("/people")
        assert (await olga.post(f"/people/{user.id}/enable")).status_code == 303
        page = (await olga.post(f"/people/{user.id}/new-password")).text
        found = re.search(r'id="made-link">http://chat\.test:8080(/new-password/[^<]+)<', page)
        assert found is not None
        assert "Ada" in text_of((await ada.get(found[1])).text)
        assert (await ada.post(found[1], {"password": "short"})).status_code == 400
        done = await ada.post(found[1], {"password": "a newer password"})
        assert (done.status_code, done.headers["location"]) == (303, "/sign-in")
        assert (await ada.get(found[1])).status_code == 410
        assert (await sign_in(ada, "Ada")).status_code == 401
        assert (await sign_in(ada, "Ada", "a newer password")).status_code == 303
        assert (await ada.get("/")).status_code == 200


async def test_operators_do_not_lock_themselves_out(server: Server, olga: Browser) -> None:
    repository = server.app.state.repository
    me = await repository.user_by_name("olga")
    await olga.get("/people")
    assert (await olga.post(f"/people/{me.id}/disable")).status_code == 404
    async with server.browser() as ada:
        await invited(server, ada, "Ada")
    await olga.get("/account")
    alone = await olga.post("/account/delete", {"old_password": PASSWORD})
    assert alone.status_code == 400
    assert "only operator" in alone.text
    assert await repository.has_operator()


async def test_one_with_a_public_address_comes_through_its_proxy(server: Server) -> None:
    async with server.browser() as browser:
        headers = {"Host": "chat.test:8080", "X-Forwarded-For": "203.0.113.9"}
        page = await browser.get("/sign-in", headers=headers)
        assert page.status_code == 200
        assert "users invite --operator" in page.text
        server.app.state.services.accounts._addresses._tries = 2
        fields = {"name": "Ada", "password": "a guess"}
        token = re.search(r'name="_csrf_token" value="([^"]+)"', page.text)
        assert token is not None
        statuses = []
        for address in ("203.0.113.9",) * 3 + ("203.0.113.10",):
            answer = await browser.http.post(
                "/sign-in",
                data={**fields, "_csrf_token": token[1]},
                headers={
                    "Host": "chat.test:8080",
                    "Origin": "http://chat.test:8080",
                    "X-Forwarded-For": address,
                },
            )
            statuses.append(answer.status_code)
        assert statuses == [401, 401, 429, 401]
        foreign = await browser.http.post(
            "/sign-in",
            data={**fields, "_csrf_token": token[1]},
            headers={"Host": "chat.test:8080", "Origin": "https://chat.test:8080"},
        )
        assert foreign.status_code == 403

"""The HTML of answers outlives the process, and follows their text and the renderer."""

from __future__ import annotations

from typing import Any

import pytest

from app.rendering import finished
from app.rendering.markdown import render_markdown
from app.settings import Settings
from tests.app.fake_engine import FakeEngine
from tests.app.talk import ended, exchange, messages, new_chat, rows
from tests.app.web_client import Browser, Server, serving

pytestmark = pytest.mark.anyio

SAID = "**Bold** and\n\n```python\nx = 1\n```\n"


def num_rendered(server: Server) -> int:
    count: int = server.app.state.services.finished.cache.num_rendered
    return count


async def test_nothing_is_rendered_again_after_a_restart(
    web_settings: Settings, fake_engine: FakeEngine
) -> None:
    async with serving(web_settings, fake_engine) as server, server.browser() as browser:
        chat_id = await new_chat(browser, server, "One", SAID)
        await exchange(browser, server, chat_id, "Two", "Plain.")
        page = await ended(browser, chat_id)
        assert num_rendered(server) == 2
        cookies = dict(browser.http.cookies)
    kept = rows(web_settings, "SELECT html FROM rendered_answer ORDER BY html")
    assert kept == sorted([(render_markdown(SAID),), (render_markdown("Plain."),)])
    async with serving(web_settings, fake_engine) as server:
        browser = Browser(server.url)
        browser.http.cookies.update(cookies)
        again = (await browser.get(f"/chats/{chat_id}")).text
        await browser.http.aclose()
        assert num_rendered(server) == 0
        assert messages(again) == messages(page)
        assert again.count('<span class="hl-') == page.count('<span class="hl-') > 0


async def test_another_renderer_renders_again(
    web_settings: Settings,
    server: Server,
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat_id = await new_chat(browser, server, "One", SAID)
    before: list[tuple[Any, ...]] = rows(web_settings, "SELECT key FROM rendered_answer")
    monkeypatch.setattr(finished, "RENDERER_VERSION", "another")
    await browser.get(f"/chats/{chat_id}")
    await server.app.state.services.finished.close()
    after = rows(web_settings, "SELECT key FROM rendered_answer")
    assert num_rendered(server) == 2
    assert len(before) == len(after) == 1
    assert before != after


async def test_html_of_another_text_is_not_used(
    web_settings: Settings, server: Server, browser: Browser
) -> None:
    chat_id = await new_chat(browser, server, "One", "As it was.")
    finished_answers = server.app.state.services.finished
    await finished_answers.close()
    repository = server.app.state.repository
    [_, answer] = await repository.path(chat_id)
    turn = await repository.continue_turn(chat_id, answer.id, {})
    await repository.finish_turn(
        turn.id,
        status="complete",
        finish_reason="eos",
        error=None,
        text="As it was. And more.",
        token_ids=[1, 2],
        latency=None,
    )
    assert "And more." in (await browser.get(f"/chats/{chat_id}")).text


async def test_a_database_that_refuses_costs_no_page(
    server: Server, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(server.app.state.repository, "keep_rendered", refuse)
    chat_id = await new_chat(browser, server, "One", "Still shown.")
    await server.app.state.services.finished.close()
    assert "Still shown." in (await browser.get(f"/chats/{chat_id}")).text

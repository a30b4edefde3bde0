"""Streams and tabs: who connects when, and how tabs of one browser keep in step.

The engine is scripted, so that each answer is known and comes at a steady pace.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import BrowserContext, Route, expect

from tests.e2e.pages import DONE, RUNNING, begin, expected, say, shown
from tests.e2e.scripted_server import HOLD, LONG_ANSWER, REPEAT

Contexts = Callable[..., tuple[BrowserContext, Any]]


def test_a_stream_that_is_refused_is_not_asked_for_again(new_context: Contexts) -> None:
    context, trouble = new_context()
    trouble.expected.append(re.compile("404"))
    page = context.new_page()
    asked = 0

    def answer(route: Route) -> None:
        nonlocal asked
        asked += 1
        route.fulfill(status=404, body="gone")

    begin(page, f"{HOLD}reading")
    page.wait_for_function("() => document.querySelector('.message--running')?._htmx?.sse?.reader")
    page.route("**/events", answer)
    # the stream breaks off without the close event
    page.evaluate("() => document.querySelector('.message--running')._htmx.sse.reader.cancel()")
    expect(page.locator(".message--unreachable")).to_have_count(1)
    page.wait_for_timeout(3000)
    assert asked == 1
    page.keyboard.press("Escape")


HIDE = """
Object.defineProperty(document, "hidden", {get: () => window.__shown !== true});
Object.defineProperty(document, "visibilityState",
  {get: () => window.__shown === true ? "visible" : "hidden"});
"""


def test_a_hidden_tab_holds_no_connection(new_context: Contexts) -> None:
    context, _ = new_context()
    page = context.new_page()
    begin(page, "Tell me everything")
    page.wait_for_selector(RUNNING)
    tab = context.new_page()
    tab.add_init_script(HIDE)
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.url)
    tab.wait_for_timeout(500)
    assert [url for url in asked if "/events" in url or "/warm" in url] == []
    tab.evaluate(
        "() => { window.__shown = true; document.dispatchEvent(new Event('visibilitychange')); }"
    )
    expect(tab.locator(DONE)).to_have_count(1)
    assert len([url for url in asked if "/events" in url]) == 1
    assert shown(tab) == expected(LONG_ANSWER)


def test_two_tabs_of_one_browser_stay_in_step(new_context: Contexts) -> None:
    context, trouble = new_context()
    first, second = context.new_page(), context.new_page()
    begin(first, f"{REPEAT}one")
    expect(first.locator(DONE)).to_have_count(1)
    second.goto(first.url)
    second.fill("#composer-text", "a draft")
    first.fill("#composer-text", "Tell me everything")
    first.press("#composer-text", "Enter")
    expect(second.locator(RUNNING)).to_have_count(1)
    for page in (first, second):
        expect(page.locator(DONE)).to_have_count(2)
        assert shown(page, 1) == expected(LONG_ANSWER)
        assert page.locator(".message").count() == 4
    expect(second.locator("#composer-text")).to_have_value("a draft")
    second.press("#composer-text", "Control+A")
    say(second, f"{REPEAT}three")
    expect(first.locator(DONE)).to_have_count(3)
    first.click(".chat-menu__toggle")
    first.fill(".chat-menu__title", "Renamed")
    first.press(".chat-menu__title", "Enter")
    expect(second.locator(".chat__title")).to_have_text("Renamed")
    trouble.expected.append(re.compile("404"))
    first.evaluate("() => { window.confirm = () => true; }")
    first.click(".chat-menu__toggle")
    first.click(".chat-menu__form .button--danger")
    expect(second.locator("#notice")).to_contain_text("deleted")


def test_a_page_left_behind_catches_up_and_keeps_the_draft(new_context: Contexts) -> None:
    here, trouble = new_context()
    trouble.expected.append(re.compile("409"))
    first = here.new_page()
    begin(first, f"{REPEAT}one")
    expect(first.locator(DONE)).to_have_count(1)
    elsewhere, _ = new_context(storage_state=here.storage_state())
    second = elsewhere.new_page()
    second.goto(first.url)
    say(second, f"{REPEAT}two")
    first.fill("#composer-text", f"{REPEAT}three")
    first.press("#composer-text", "Enter")
    first.click("#notice a")
    expect(first.locator(DONE)).to_have_count(2)
    expect(first.locator("#notice")).to_be_empty()
    expect(first.locator("#composer-text")).to_have_value(f"{REPEAT}three")
    first.press("#composer-text", "Enter")
    expect(first.locator(DONE)).to_have_count(3)
    assert shown(first, 2) == "three"


def test_an_old_tab_still_sends_after_another_one_signed_in(new_context: Contexts) -> None:
    context, _ = new_context()
    old, new = context.new_page(), context.new_page()
    old.goto("/")
    begin(new, f"{REPEAT}new tab")
    expect(new.locator(DONE)).to_have_count(1)
    old.fill("#composer-text", f"{REPEAT}old tab")
    old.press("#composer-text", "Enter")
    old.wait_for_url(re.compile(r"/chats/[0-9a-f]+"))
    expect(old.locator(".chat-list__link")).to_have_count(2)
    expect(old.locator(DONE)).to_have_count(1)

"""The pages in a browser: a turn's life, keys, scrolling, narrow windows, no script.

The engine is scripted here, so that each answer is known and comes at a steady pace.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from app.rendering import render_markdown
from tests.e2e.pages import ANSWER, DONE, RUNNING, begin, say
from tests.e2e.scripted_server import LONG_ANSWER, REPEAT
from tests.e2e.server_process import ROOT, ServerProcess

Contexts = Callable[..., tuple[BrowserContext, Any]]


def shown(page: Page, number: int = 0) -> str:
    """The text of an answer as the page holds it, without white space and our buttons."""
    text = (
        page.locator(ANSWER)
        .nth(number)
        .evaluate(
            """(message) => {
          const copy = message.cloneNode(true);
          copy.querySelectorAll(".code__copy, footer").forEach((extra) => extra.remove());
          return copy.textContent;
        }"""
        )
    )
    return re.sub(r"\s+", "", text)


def expected(markdown: str) -> str:
    """The same of the markdown's own HTML, its tags cut out."""
    return re.sub(r"\s+", "", unescape(re.sub(r"<[^>]+>", "", render_markdown(markdown))))


def test_an_answer_grows_survives_a_reload_and_is_there_once(page: Page) -> None:
    begin(page, "Tell me everything")
    expect(page.locator(RUNNING)).to_have_count(1)
    lengths: list[int] = []
    for _ in range(4):
        page.wait_for_function(
            "(before) => document.querySelector('.message--running')?.textContent.length > before",
            arg=lengths[-1] if lengths else 100,
        )
        lengths.append(page.locator(RUNNING).evaluate("(m) => m.textContent.length"))
    assert lengths == sorted(set(lengths))
    page.reload()
    expect(page.locator(RUNNING)).to_have_count(1)
    assert len(shown(page)) > 50, "all the text so far is on the page at once"
    expect(page.locator(DONE)).to_have_count(1)
    assert shown(page) == expected(LONG_ANSWER)
    assert page.locator(".message").count() == 2
    page.reload()
    assert shown(page) == expected(LONG_ANSWER)
    assert page.locator("[hx-sse\\:connect]").count() == 0


def test_live_text_equals_the_finished_page(page: Page) -> None:
    """Block by block over the stream, without any reload in between."""
    begin(page, "Tell me everything")
    expect(page.locator(".answer--open p", has_text="Paragraph 8")).to_have_count(1)
    live = shown(page)
    assert expected(LONG_ANSWER).startswith(live[:-20])
    assert len(live) > len(expected(LONG_ANSWER)) - 200
    expect(page.locator(DONE)).to_have_count(1)
    assert shown(page) == expected(LONG_ANSWER)


def test_stop_and_go_on(page: Page) -> None:
    begin(page, "Tell me everything")
    page.wait_for_selector(f"{RUNNING} h1")
    page.click(".message__stop")
    expect(page.locator(RUNNING)).to_have_count(0)
    stopped = shown(page)
    assert "Stopped" in stopped or "stopped" in stopped
    assert "Paragraph8" not in stopped
    page.reload()
    assert shown(page) == stopped
    say(page, f"{REPEAT}still here")
    assert shown(page, 1) == "stillhere"


def test_escape_stops(page: Page) -> None:
    begin(page, "Tell me everything")
    page.wait_for_selector(f"{RUNNING} h1")
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)
    assert "Paragraph8" not in shown(page)


def test_shift_enter_is_a_new_line_and_enter_sends(page: Page) -> None:
    begin(page, f"{REPEAT}ready")
    expect(page.locator(DONE)).to_have_count(1)
    page.locator("#composer-text").press_sequentially("one")
    page.press("#composer-text", "Shift+Enter")
    page.locator("#composer-text").press_sequentially("  two")
    assert page.input_value("#composer-text") == "one\n  two"
    page.press("#composer-text", "Enter")
    own = page.locator(".message--user .message__body").nth(1)
    expect(own).to_be_visible()
    assert own.text_content() == "one\n  two"
    assert own.evaluate("(body) => getComputedStyle(body).whiteSpace").startswith("pre-wrap")
    expect(page.locator("#composer-text")).to_have_value("")
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)


def test_an_empty_message_is_not_sent(page: Page) -> None:
    page.goto("/")
    page.fill("#composer-text", "  \n ")
    page.press("#composer-text", "Enter")
    page.wait_for_timeout(300)
    assert page.url.rstrip("/").endswith(page.evaluate("location.host"))


def test_the_page_follows_the_answer_unless_the_reader_went_up(page: Page) -> None:
    begin(page, "Tell me everything")
    from_end = (
        "() => { const c = document.getElementById('conversation');"
        " return c.scrollHeight - c.clientHeight - c.scrollTop; }"
    )
    page.wait_for_function("() => document.getElementById('conversation').scrollTop > 200")
    assert page.evaluate(from_end) < 60
    page.mouse.move(700, 400)
    page.mouse.wheel(0, -400)
    page.wait_for_selector(".jump")
    top = page.evaluate("document.getElementById('conversation').scrollTop")
    page.wait_for_timeout(700)
    assert abs(page.evaluate("document.getElementById('conversation').scrollTop") - top) < 2
    page.click(".jump")
    assert page.evaluate(from_end) < 60
    expect(page.locator(".jump")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)


def test_code_can_be_copied(page: Page) -> None:
    begin(page, f"{REPEAT}```python\nprint(1)\n```")
    expect(page.locator(DONE)).to_have_count(1)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".code__copy")
    expect(page.locator(".code__copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)\n"


def test_rename_and_delete(page: Page) -> None:
    begin(page, f"{REPEAT}first")
    expect(page.locator(DONE)).to_have_count(1)
    page.click(".chat-menu__toggle")
    page.fill(".chat-menu__title", "A better <name>")
    page.press(".chat-menu__title", "Enter")
    expect(page.locator(".chat-list__link")).to_have_text("A better <name>")
    page.reload()
    expect(page.locator(".chat-list__link")).to_have_text("A better <name>")
    expect(page.locator(".chat__title")).to_have_text("A better <name>")
    chat = page.url
    page.on("dialog", lambda dialog: dialog.accept())
    page.click(".chat-menu__toggle")
    page.click(".chat-menu__form .button--danger")
    expect(page.locator(".chat-list__link")).to_have_count(0)
    assert page.request.get(chat).status == 404


def test_latency_pages_draw_their_charts(page: Page) -> None:
    begin(page, f"{REPEAT}one")
    expect(page.locator(DONE)).to_have_count(1)
    say(page, f"{REPEAT}two")
    page.click(".chat__latency")
    expect(page.locator(".chart canvas")).to_have_count(3)
    page.goto("/latency")
    canvases = page.locator(".chart canvas")
    expect(canvases.first).to_be_visible()
    assert canvases.count() == page.locator(".chart").count() >= 4
    painted = canvases.first.evaluate(
        """(canvas) => new Set(canvas.getContext("2d")
          .getImageData(0, 0, canvas.width, canvas.height).data).size"""
    )
    assert painted > 20, "something is drawn"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_windows_lose_nothing(new_context: Contexts, scheme: str) -> None:
    context, _ = new_context(viewport={"width": 380, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    begin(page, f"{REPEAT}```\n{'long ' * 60}\n```\n\n{'W' * 300}")
    expect(page.locator(DONE)).to_have_count(1)
    chat = page.url
    for path in (chat, "/", "/latency", f"{chat}/latency"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, path
        assert page.evaluate("document.getElementById('main').scrollWidth") <= 380, path
    page.goto(chat)
    expect(page.locator(".chat-list")).to_be_hidden()
    page.click(".topbar__toggle")
    expect(page.locator(".chat-list__link")).to_be_visible()
    expect(page.locator(".topbar__toggle")).to_have_attribute("aria-expanded", "true")


def test_it_works_without_script(new_context: Contexts) -> None:
    context, _ = new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto("/")
    page.fill("#composer-text", f"{REPEAT}no script")
    page.click(".composer__send")
    page.wait_for_url(re.compile(r"/chats/[0-9a-f]+"))
    for _ in range(20):
        page.goto(page.url)
        if page.locator(DONE).count():
            break
    expect(page.locator(f"{ANSWER} .answer").first).to_contain_text("no script")


def test_a_foreign_csrf_cookie_locks_nobody_out(
    new_context: Contexts, server: ServerProcess
) -> None:
    context, _ = new_context()
    context.add_cookies([{"name": "rejoinder_csrf", "value": "foreign", "url": server.url}])
    page = context.new_page()
    begin(page, f"{REPEAT}let in")
    expect(page.locator(DONE)).to_have_count(1)


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
    first.on("dialog", lambda dialog: dialog.accept())
    first.click(".chat-menu__toggle")
    first.click(".chat-menu__form .button--danger")
    expect(second.locator("#notice")).to_contain_text("deleted")


AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible(new_context: Contexts, scheme: str) -> None:
    context, trouble = new_context(color_scheme=scheme)
    trouble.expected.append(re.compile("style-src|inline style"))  # axe measures with styles
    page = context.new_page()
    begin(page, "Tell me everything")
    expect(page.locator(DONE)).to_have_count(1)
    chat = page.url
    faults = []
    for path in (chat, "/", "/latency", f"{chat}/latency"):
        page.goto(path)
        page.evaluate(AXE.read_text())
        result = page.evaluate("axe.run(document, {preload: false})")
        for violation in result["violations"]:
            for node in violation["nodes"]:
                faults.append((path, violation["id"], node["html"][:120]))
    assert faults == []

"""The pages around the chat: list, latency, narrow windows, no script, accessibility.

The engine is scripted, so that each answer is known and comes at a steady pace.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import ANSWER, DONE, begin, say
from tests.e2e.scripted_server import REPEAT
from tests.e2e.server_process import ROOT, ServerProcess

Contexts = Callable[..., tuple[BrowserContext, Any]]


def test_code_can_be_copied(page: Page) -> None:
    begin(page, f"{REPEAT}```python\nprint(1)\n```")
    expect(page.locator(DONE)).to_have_count(1)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".code__copy")
    expect(page.locator(".code__copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)\n"


def test_a_title_that_is_refused_can_be_put_right(new_context: Contexts) -> None:
    context, trouble = new_context()
    trouble.expected.append(re.compile("400"))
    page = context.new_page()
    begin(page, f"{REPEAT}first")
    expect(page.locator(DONE)).to_have_count(1)
    page.click(".chat-menu__toggle")
    page.fill(".chat-menu__title", "   ")
    page.press(".chat-menu__title", "Enter")
    expect(page.locator("#notice")).to_contain_text("The title is empty")
    page.fill(".chat-menu__title", "A title")
    page.press(".chat-menu__title", "Enter")
    expect(page.locator(".chat__title")).to_have_text("A title")
    expect(page.locator("#notice")).to_be_empty()


def test_text_runs_in_the_direction_of_its_script(page: Page) -> None:
    begin(page, f"{REPEAT}مرحبا بالعالم")
    expect(page.locator(DONE)).to_have_count(1)
    page.reload()
    page.fill("#composer-text", "שלום")

    direction = "(one) => getComputedStyle(one).direction"
    for selector in (".message--assistant .answer", "#composer-text"):
        assert page.locator(selector).first.evaluate(direction) == "rtl"
    say(page, "مرحبا")
    user = page.locator(".message--user .message__body")
    assert user.last.evaluate(direction) == "rtl"
    assert user.first.evaluate(direction) == "ltr"


@pytest.mark.parametrize("script", [True, False])
def test_the_chosen_assistant_greets(new_context: Contexts, script: bool) -> None:
    context, _ = new_context(java_script_enabled=script)
    page = context.new_page()
    page.goto("/")
    cards = page.locator(".assistants__choice")
    assert cards.count() >= 3
    greetings = page.locator(".assistants__greeting:visible")
    for number in range(cards.count()):
        cards.nth(number).click()
        expect(greetings).to_have_count(1)
        expect(cards.nth(number).locator(".assistants__greeting")).to_be_visible()


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
    expect(page.locator(".chart canvas")).to_have_count(5)
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".turn").first).to_contain_text("Turn 2")
    assert page.locator(".turn").first.locator(".gantt__span--tokens").bounding_box()
    page.goto("/latency")
    page.click(".ranges__link >> text=Week")
    expect(page.locator(".ranges__link[aria-current]")).to_have_text("Week")
    canvases = page.locator(".chart canvas")
    expect(canvases.first).to_be_visible()
    assert canvases.count() == page.locator(".chart").count() >= 4
    painted = canvases.first.evaluate(
        """(canvas) => new Set(canvas.getContext("2d")
          .getImageData(0, 0, canvas.width, canvas.height).data).size"""
    )
    assert painted > 20, "something is drawn"


def test_turns_are_downloaded(page: Page) -> None:
    begin(page, f"{REPEAT}one")
    expect(page.locator(DONE)).to_have_count(1)
    say(page, f"{REPEAT}two")
    chat = page.url.split("#")[0]
    for path, turns in ((f"{chat}/latency", 2), ("/latency?span=week", 2)):
        page.goto(path)
        for form in ("CSV", "JSON"):
            with page.expect_download() as download:
                page.get_by_role("link", name=form).click()
            assert download.value.suggested_filename.endswith(f".{form.lower()}")
            text = download.value.path().read_text()
            if form == "CSV":
                rows: list[Any] = list(csv.DictReader(io.StringIO(text)))
            else:
                rows = json.loads(text)
            assert len(rows) >= turns
            assert all(float(row["first_token_ms"]) > 0 for row in rows)


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

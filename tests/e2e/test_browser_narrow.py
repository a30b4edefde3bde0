"""A phone's width: nothing is cut off, and the list of chats is a drawer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import DONE, begin
from tests.e2e.scripted_server import REPEAT

Contexts = Callable[..., tuple[BrowserContext, Any]]
WIDTH = 380
TABLE = f"| {' | '.join(f'column {n}' for n in range(12))} |\n|{'---|' * 12}\n"
# What is too wide for the page and no part of something that is scrolled by itself.
CUT_OFF = """(width) => [...document.querySelectorAll("body *")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && box.right > width + 1 && getComputedStyle(one).visibility !== "hidden"
    && !one.closest(".answer pre, .answer .table, .table-scroll, .visually-hidden, .sidebar");
}).map((one) => one.outerHTML.slice(0, 100))"""


@pytest.fixture
def page(new_context: Contexts) -> Page:
    context, _ = new_context(viewport={"width": WIDTH, "height": 740})
    return context.new_page()


def test_nothing_is_cut_off(page: Page) -> None:
    begin(page, f"{REPEAT}```\n{'long ' * 60}\n```\n\n{'W' * 300}\n\n{TABLE}")
    expect(page.locator(DONE)).to_have_count(1)
    chat = page.url
    for path in (chat, "/", "/latency", f"{chat}/latency"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH, path
        assert page.evaluate("document.getElementById('main').scrollWidth") <= WIDTH, path
        assert page.evaluate(CUT_OFF, WIDTH) == [], path
    page.goto(chat)
    table = page.locator(".answer .table")
    assert table.evaluate("(box) => box.scrollWidth > box.clientWidth"), "it is scrolled"
    heights = table.locator("th").evaluate_all("(cells) => cells.map((c) => c.offsetHeight)")
    assert max(heights) < 90, "words in cells are whole"
    table.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.answer .table').scrollLeft > 0")


def test_the_list_of_chats_is_a_drawer(page: Page) -> None:
    begin(page, f"{REPEAT}hello")
    expect(page.locator(DONE)).to_have_count(1)
    toggle, link = page.locator(".topbar__toggle"), page.locator(".chat-list__link")
    expect(link).to_be_hidden()
    toggle.click()
    expect(link).to_be_visible()
    expect(toggle).to_have_attribute("aria-expanded", "true")
    assert page.evaluate("document.getElementById('sidebar').contains(document.activeElement)")
    for _ in range(20):  # what it covers has the focus only when it is gone
        page.keyboard.press("Tab")
        if page.evaluate("document.getElementById('main').contains(document.activeElement)"):
            break
    expect(link).to_be_hidden()
    toggle.click()
    expect(link).to_be_visible()
    page.keyboard.press("Escape")
    expect(link).to_be_hidden()
    expect(toggle).to_be_focused()
    toggle.click()
    page.mouse.click(WIDTH - 10, 500)  # beside it
    expect(link).to_be_hidden()
    expect(toggle).to_have_attribute("aria-expanded", "false")
    page.locator("#composer-text").fill("it can be written again")
    toggle.click()
    link.click()
    page.wait_for_load_state()
    expect(link).to_be_hidden()

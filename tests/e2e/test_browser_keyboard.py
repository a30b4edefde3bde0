"""Everything that matters can be done from the keyboard."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.e2e.pages import DONE, RUNNING, begin, shown
from tests.e2e.scripted_server import REPEAT


def three_chats(page: Page) -> list[str]:
    """Three chats, the latest first as in the list; the page shows the latest."""
    addresses = []
    for name in ("one", "two", "three"):
        begin(page, f"{REPEAT}{name}")
        expect(page.locator(DONE)).to_have_count(1)
        addresses.append(page.url)
    return addresses[::-1]


def test_new_chat_and_the_chats_above_and_below(page: Page) -> None:
    third, second, first = three_chats(page)
    page.keyboard.press("Alt+ArrowDown")
    page.wait_for_url(second)
    page.keyboard.press("Alt+ArrowDown")
    page.wait_for_url(first)
    page.keyboard.press("Alt+ArrowDown")  # the last one: nothing below it
    page.wait_for_timeout(300)
    assert page.url == first
    page.keyboard.press("Alt+ArrowUp")
    page.wait_for_url(second)
    page.keyboard.press("Control+Shift+O")
    page.wait_for_url(re.compile(r"/$"))
    expect(page.locator("#composer-text")).to_be_focused()
    page.keyboard.press("Alt+ArrowDown")  # from a page that is in no chat: the latest
    page.wait_for_url(third)


def test_the_list_of_keys(page: Page) -> None:
    page.goto("/")
    dialog = page.locator("#shortcuts")
    page.keyboard.press("?")  # the message has the focus: it is text
    expect(page.locator("#composer-text")).to_have_value("?")
    expect(dialog).to_be_hidden()
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("?")
    expect(dialog).to_be_visible()
    for words in ("New chat", "Search", "Previous, next chat", "Stop", "This list"):
        expect(dialog).to_contain_text(words)
    page.keyboard.press("Alt+ArrowDown")  # nothing happens behind it
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.click(".topbar__help")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".topbar__help")).to_be_focused()
    page.keyboard.press("?")
    page.mouse.click(5, 400)  # beside it
    expect(dialog).to_be_hidden()


def test_writing_and_stopping_without_a_mouse(page: Page) -> None:
    begin(page, f"{REPEAT}hello")
    expect(page.locator(DONE)).to_have_count(1)
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Shift+Escape")
    expect(page.locator("#composer-text")).to_be_focused()
    page.keyboard.type("Tell me everything")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{RUNNING} h1")
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)
    assert "Paragraph8" not in shown(page, 1)


def test_escape_closes_a_menu_before_it_stops_an_answer(page: Page) -> None:
    begin(page, "Tell me everything")
    page.wait_for_selector(f"{RUNNING} h1")
    page.click(".chat-menu__toggle")
    page.keyboard.press("Escape")
    expect(page.locator(".chat-menu[open]")).to_have_count(0)
    expect(page.locator(".chat-menu__toggle")).to_be_focused()
    expect(page.locator(RUNNING)).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)

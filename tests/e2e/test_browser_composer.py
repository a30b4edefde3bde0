"""What a person writes is not lost: queued, withdrawn, kept as a draft, carried over, copied."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import ANSWER, DONE, RUNNING, begin, say, shown
from tests.e2e.scripted_server import LONG_ANSWER, REPEAT, SLOWLY

Contexts = Callable[..., tuple[BrowserContext, Any]]
FIELD = "#composer-text"


def ready(page: Page, text: str = "ready") -> str:
    """A chat of one short exchange; its address."""
    begin(page, REPEAT + text)
    expect(page.locator(DONE)).to_have_count(1)
    return page.url


def send(page: Page, text: str) -> None:
    page.fill(FIELD, text)
    page.press(FIELD, "Enter")


def test_one_message_waits_and_is_sent_when_the_answer_ends(page: Page) -> None:
    begin(page, SLOWLY)
    page.wait_for_selector(f"{RUNNING} h1")
    send(page, f"{REPEAT}first thought")
    expect(page.locator(".queued__text")).to_have_text(f"{REPEAT}first thought")
    expect(page.locator(FIELD)).to_have_value("")
    expect(page.locator(".composer__send")).to_be_disabled()
    page.fill(FIELD, "and this")
    page.click(".queued__withdraw")
    expect(page.locator(FIELD)).to_have_value(f"{REPEAT}first thought\n\nand this")
    expect(page.locator(".queued")).to_have_count(0)
    send(page, f"{REPEAT}second thought")
    expect(page.locator(".queued__text")).to_have_text(f"{REPEAT}second thought")
    page.reload()
    expect(page.locator(".queued__text")).to_have_text(f"{REPEAT}second thought")
    page.fill(FIELD, "typed meanwhile")
    page.keyboard.press("Escape")  # stopping ends the answer, too
    expect(page.locator(DONE)).to_have_count(2)
    assert shown(page, 1) == "secondthought"
    expect(page.locator(".queued")).to_have_count(0)
    expect(page.locator(FIELD)).to_have_value("typed meanwhile")
    ids = page.locator("#conversation > *").evaluate_all("(all) => all.map((one) => one.id)")
    assert len(ids) == len(set(ids)) == 4


def test_a_second_one_is_refused_and_kept(new_context: Contexts) -> None:
    context, trouble = new_context()
    trouble.expected.append(re.compile("status of 409"))
    page = context.new_page()
    begin(page, SLOWLY)
    other = context.new_page()
    other.goto(page.url)
    send(page, f"{REPEAT}from this tab")
    expect(page.locator(".queued")).to_have_count(1)
    other.fill(FIELD, "from the other tab")  # which may not have heard of it yet
    other.evaluate("() => document.getElementById('composer').requestSubmit()")
    expect(other.locator("#notice")).to_contain_text("waits for its answer already")
    expect(other.locator(FIELD)).to_have_value("from the other tab")
    page.bring_to_front()
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)
    assert shown(page, 1) == "fromthistab"


def test_drafts_stay_with_their_chats(page: Page) -> None:
    first = ready(page, "one")
    second = ready(page, "two")
    page.locator(FIELD).press_sequentially("for the second")
    page.wait_for_timeout(400)
    page.goto(first)
    expect(page.locator(FIELD)).to_have_value("")
    page.locator(FIELD).press_sequentially("for the first")
    page.goto(second)  # before it was kept: it is kept on leaving
    expect(page.locator(FIELD)).to_have_value("for the second")
    page.goto("/")
    expect(page.locator(FIELD)).to_have_value("")
    page.goto(first)
    expect(page.locator(FIELD)).to_have_value("for the first")
    say(page, f"{REPEAT}sent")
    page.reload()
    expect(page.locator(FIELD)).to_have_value("")
    page.goto(second)
    expect(page.locator(FIELD)).to_have_value("for the second")


def test_a_message_that_could_not_be_sent_is_there_after_a_reload(new_context: Contexts) -> None:
    context, trouble = new_context()
    trouble.expected.append(re.compile("ERR_FAILED|Failed to fetch"))
    page = context.new_page()
    ready(page)
    page.route("**/messages", lambda route: route.abort())
    page.locator(FIELD).press_sequentially("not sent")
    page.press(FIELD, "Enter")
    expect(page.locator("#notice")).to_contain_text("cannot be reached")
    page.unroute("**/messages")
    page.reload()
    expect(page.locator(FIELD)).to_have_value("not sent")


def test_a_message_is_copied_as_it_is_stored(new_context: Contexts) -> None:
    context, _ = new_context()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    text = "  two  spaces\n\n\tand <b>tags</b> & `code`"
    begin(page, REPEAT + text)
    expect(page.locator(DONE)).to_have_count(1)
    for number, stored in ((0, REPEAT + text), (1, text.lstrip())):
        button = page.locator(".message__copy").nth(number)
        button.click()
        expect(button).to_have_text("Copied")
        copied = page.evaluate("() => navigator.clipboard.readText()")
        assert copied.strip() == stored.strip()
        expect(button).to_have_text("Copy")
    send(page, "Tell me everything")
    expect(page.locator(DONE)).to_have_count(2)
    page.locator(".message__copy").last.click()
    expect(page.locator(".message__copy").last).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == LONG_ANSWER


def test_a_long_message_is_shown_in_part_until_it_is_opened(page: Page) -> None:
    ready(page)
    say(page, f"{REPEAT}x\n" + "A line of a long message.\n" * 60)
    body = page.locator(".message__body--long")
    box = body.bounding_box()
    assert box is not None
    assert box["height"] < 300
    page.locator(".message__whole").focus()
    page.keyboard.press("Space")
    expect(page.locator(".message__more-hide")).to_be_visible()
    box = body.bounding_box()
    assert box is not None
    assert box["height"] > 900
    page.click(".message__more")
    expect(page.locator(".message__more-show")).to_have_text(
        re.compile("Show all 1,5.. characters")
    )
    expect(page.locator(".message__more-hide")).to_be_hidden()


def test_a_chat_without_room_goes_on_in_a_new_one(new_context: Contexts) -> None:
    context, trouble = new_context()
    trouble.expected.append(re.compile("status of 413"))
    page = context.new_page()
    old = ready(page, "remember this")
    expect(page.locator(".composer__meter")).to_have_attribute("max", "8192")
    expect(page.locator(".composer__usage")).to_contain_text("of 8,192")
    send(page, "Too long. " * 4000)
    expect(page.locator("#notice .problem")).to_contain_text("8,192")
    page.fill(FIELD, f"{REPEAT}shorter")
    page.click(".problem__carry button")
    page.wait_for_url(lambda url: "/chats/" in url and url != old)
    expect(page.locator(".chat__carried")).to_contain_text("all of it was carried over")
    expect(page.locator(DONE)).to_have_count(1)
    assert [shown(page, n) for n in (0, 1)] == ["rememberthis", "shorter"]
    expect(page.locator(FIELD)).to_have_value("")
    page.click(".chat__carried a")
    page.wait_for_url(old)
    expect(page.locator(ANSWER)).to_have_count(1)
    expect(page.locator(FIELD)).to_have_value("")  # it was sent over there

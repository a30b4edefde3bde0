"""A turn's life on the page: growing, reload, stop, keys, scrolling.

The engine is scripted, so that each answer is known and comes at a steady pace.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import DONE, RUNNING, begin, expected, say, shown
from tests.e2e.scripted_server import LONG_ANSWER, REPEAT

Contexts = Callable[..., tuple[BrowserContext, Any]]


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


RECORD = """() => {
  window.__seen = [];
  new MutationObserver(() => {
    const bodies = document.querySelectorAll(".message--running .answer");
    const copies = [...bodies].map((body) => body.cloneNode(true));
    copies.forEach((copy) => copy.querySelectorAll(".code__copy").forEach((it) => it.remove()));
    window.__seen.push(copies.map((copy) => copy.textContent).join("").replace(/\\s+/g, ""));
  }).observe(document.getElementById("conversation"), {childList: true, subtree: true});
}"""


def test_live_text_is_a_growing_part_of_the_finished_one(page: Page) -> None:
    """Block by block over one stream: nothing doubled, nothing lost, whatever was seen when."""
    begin(page, "Tell me everything")
    page.evaluate(RECORD)
    expect(page.locator(DONE)).to_have_count(1)
    whole = expected(LONG_ANSWER)
    assert shown(page) == whole
    seen: list[str] = page.evaluate("() => window.__seen")
    lengths = {len(text) for text in seen}
    assert len(lengths) > 5, "it was seen to grow"
    assert max(lengths) <= len(whole) + 10
    for text in seen:
        agreeing = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, whole, strict=False))
        )
        # The block still open may read otherwise until its markup is complete, a table most.
        assert agreeing >= len(text) - 100, text


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


def test_only_the_last_answer_offers_retry(page: Page) -> None:
    begin(page, "Tell me everything")
    page.click(".message__stop")
    retry = page.locator(".message__retry:visible")
    expect(retry).to_have_count(1)
    say(page, f"{REPEAT}go on")
    expect(retry).to_have_count(0)


def test_a_server_out_of_reach_loses_no_text(
    new_context: Callable[..., tuple[BrowserContext, Any]],
) -> None:
    context, trouble = new_context()
    trouble.expected.append(re.compile("ERR_FAILED|Failed to fetch"))
    page = context.new_page()
    begin(page, f"{REPEAT}one")
    expect(page.locator(DONE)).to_have_count(1)
    page.route("**/messages", lambda route: route.abort())
    page.fill("#composer-text", f"{REPEAT}two")
    page.press("#composer-text", "Enter")
    expect(page.locator("#notice")).to_contain_text("The server cannot be reached.")
    expect(page.locator("#composer-text")).to_have_value(f"{REPEAT}two")
    page.unroute("**/messages")
    page.press("#composer-text", "Enter")
    expect(page.locator(DONE)).to_have_count(2)
    expect(page.locator("#notice")).to_be_empty()


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


def test_a_long_message_keeps_the_page_alive_and_is_not_lost(new_context: Contexts) -> None:
    """Ten pages and more: the field takes them at once; too long a text is refused and kept."""
    context, trouble = new_context()
    trouble.expected.append(re.compile("status of 4"))
    page = context.new_page()
    begin(page, f"{REPEAT}ready")
    expect(page.locator(DONE)).to_have_count(1)
    text = "Ten pages of words. " * 3000
    took = page.evaluate(
        """async (text) => {
          const field = document.getElementById("composer-text");
          const began = performance.now();
          field.value = text;
          field.dispatchEvent(new InputEvent("input", {bubbles: true}));
          await new Promise(requestAnimationFrame);
          return performance.now() - began;
        }""",
        text,
    )
    assert took < 500
    page.press("#composer-text", "Enter")
    expect(page.locator("#notice .problem")).to_contain_text("8,192")
    expect(page.locator("#composer-text")).to_have_value(text)
    expect(page.locator(".composer__send")).to_be_enabled()
    page.click("#notice a")  # to a new chat, the text comes along
    page.wait_for_url(re.compile(r"/$"))
    expect(page.locator("#composer-text")).to_have_value(text)
    page.go_back()
    page.goto("/")
    expect(page.locator("#composer-text")).to_have_value("")  # only once
    page.click(".chat-list__link")
    page.wait_for_url(re.compile(r"/chats/"))
    pasted = "x" * 120_000  # over the limit of characters too: refused with the counts, not cut
    page.fill("#composer-text", pasted)
    page.press("#composer-text", "Enter")
    expect(page.locator("#notice .problem")).to_contain_text("120,000 characters; up to 100,000")
    expect(page.locator("#composer-text")).to_have_value(pasted)
    page.fill("#composer-text", f"{REPEAT}short")
    page.press("#composer-text", "Enter")
    expect(page.locator(DONE)).to_have_count(2)
    expect(page.locator("#notice")).to_be_hidden()

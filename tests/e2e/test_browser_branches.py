"""Asking otherwise, answering again, side by side, going on: on the page, without reloading it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import ANSWER, DONE, RUNNING, begin, expected, say, shown
from tests.e2e.scripted_server import LONG_ANSWER, REPEAT, SLOWLY

Contexts = Callable[..., tuple[BrowserContext, Any]]
PLACE = ".branch__place"
SAMPLES = """Some words in a first paragraph, which are to be compared with others.

```python
print("a line of code that is wider than a column of several answers side by side")
```"""


def ready(page: Page, text: str = "ready") -> None:
    """A chat of one short exchange, marked so that a reload of the page is seen."""
    begin(page, REPEAT + text)
    expect(page.locator(DONE)).to_have_count(1)
    page.evaluate("() => { window.__same = true; }")


def same_page(page: Page) -> bool:
    return bool(page.evaluate("() => window.__same === true"))


def ask_for(page: Page, number: int, text: str) -> None:
    page.fill("#composer-text", text)
    page.select_option(".composer__answers select", str(number))
    page.press("#composer-text", "Enter")
    expect(page.locator(".candidates")).to_have_count(1)


def all_ended(page: Page) -> None:
    expect(page.locator(RUNNING)).to_have_count(0)


def edit(page: Page, number: int, text: str) -> None:
    page.locator(".edit__open").nth(number).click()
    field = page.locator(".edit__text").nth(number)
    expect(field).to_be_focused()
    field.fill(text)
    page.locator(".edit__send").nth(number).click()


def test_a_message_asked_otherwise_is_a_version_beside_the_first(page: Page) -> None:
    ready(page, "one")
    say(page, f"{REPEAT}two")
    edit(page, 0, f"{REPEAT}eins")
    expect(page.locator(ANSWER)).to_have_count(1)
    all_ended(page)
    assert shown(page) == "eins"
    expect(page.locator(PLACE)).to_have_text("2 / 2")
    page.keyboard.press("Tab")
    page.locator("#previous-0").focus()
    page.keyboard.press("Enter")
    expect(page.locator(ANSWER)).to_have_count(2)
    expect(page.locator(PLACE)).to_have_text("1 / 2")
    assert [shown(page, n) for n in (0, 1)] == ["one", "two"]
    expect(page.locator("#next-0")).to_be_focused()  # the other way, where the first is at its end
    page.keyboard.press("Enter")
    expect(page.locator(PLACE)).to_have_text("2 / 2")
    assert shown(page) == "eins"
    assert same_page(page)
    page.reload()
    assert shown(page) == "eins", "the chat remembers which one is shown"


def test_editing_can_be_left_without_a_trace(page: Page) -> None:
    ready(page)
    page.locator(".edit__open").click()
    page.locator(".edit__text").fill("not this")
    page.keyboard.press("Escape")
    expect(page.locator(".edit__text")).to_be_hidden()
    expect(page.locator(".edit__open")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".edit__text")).to_have_value(f"{REPEAT}ready")
    page.locator(".edit__text").fill(f"{REPEAT}by keyboard")
    page.keyboard.press("Control+Enter")
    expect(page.locator(PLACE)).to_have_text("2 / 2")
    all_ended(page)
    assert shown(page) == "bykeyboard"


def test_another_version_appears_where_the_one_before_was(page: Page) -> None:
    ready(page, "one")
    for number in range(6):
        say(page, f"{REPEAT}{'Some words to fill the page. ' * 12}{number}")
    button = page.locator("#again-7")
    button.scroll_into_view_if_needed()
    button.click()
    all_ended(page)
    expect(page.locator(ANSWER)).to_have_count(4)
    way = page.locator("#previous-7")
    way.scroll_into_view_if_needed()
    page.wait_for_timeout(100)
    before = way.bounding_box()
    way.click()
    expect(page.locator(ANSWER)).to_have_count(7)
    page.wait_for_timeout(200)
    after = page.locator("#previous-7").bounding_box()
    assert before is not None
    assert after is not None
    assert abs(after["y"] - before["y"]) < 3
    assert same_page(page)


def test_answers_side_by_side_are_written_together_and_one_is_taken(page: Page) -> None:
    ready(page)
    streams: list[str] = []
    page.on("request", lambda one: streams.append(one.url) if "/turns/" in one.url else None)
    ask_for(page, 3, SLOWLY)
    page.wait_for_function(
        """() => [...document.querySelectorAll(".candidates .message")]
          .every((one) => one.textContent.length > 300)"""
    )
    expect(page.locator(".candidates .message--running")).to_have_count(3)
    boxes = page.locator(".candidates .message").evaluate_all(
        "(all) => all.map((one) => one.getBoundingClientRect()).map((box) => [box.x, box.y])"
    )
    lefts = [x for x, _ in boxes]
    assert lefts == sorted(set(lefts))
    assert len({round(y) for _, y in boxes}) == 1
    assert len(streams) == 1, "they share one connection"
    page.keyboard.press("Escape")  # stops all of them
    all_ended(page)
    expect(page.locator(".candidates__hint")).to_contain_text("goes on from answer 1")
    ask_for(page, 2, f"{REPEAT}{SAMPLES}")
    expect(page.locator(".candidates .message")).to_have_count(2)
    all_ended(page)
    answers = page.locator(".candidates .message")
    assert answers.nth(1).locator(".answer").inner_text().startswith("Candidate 1. Some words")
    page.click("#take-2")
    expect(page.locator(".message--chosen")).to_contain_text("Answer 2")
    expect(page.locator(".candidates__hint")).to_contain_text("goes on from answer 2")
    page.fill("#composer-text", f"{REPEAT}after that")
    page.press("#composer-text", "Enter")
    expect(page.locator(ANSWER).last).to_contain_text("after that")
    all_ended(page)
    for _ in range(2):
        expect(page.locator(".candidates")).to_have_count(0)
        assert shown(page, 2) == expected(f"Candidate 1. {SAMPLES}")
        expect(page.locator(PLACE).last).to_have_text("2 / 2")
        page.reload()


def test_they_are_stacked_on_a_narrow_screen(new_context: Contexts) -> None:
    context, _ = new_context(viewport={"width": 380, "height": 740})
    page = context.new_page()
    ready(page)
    page.locator(".compare summary").click()
    choice = page.locator(".compare__choices button").first
    box = choice.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 380
    choice.click()
    all_ended(page)
    boxes = [page.locator(".candidates .message").nth(n).bounding_box() for n in range(2)]
    assert len({round(box["x"]) for box in boxes if box}) == 1
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 380


def test_a_stopped_answer_goes_on_where_it_was(page: Page) -> None:
    begin(page, SLOWLY)
    page.wait_for_selector(f"{RUNNING} ol")
    page.keyboard.press("Escape")
    all_ended(page)
    stopped = page.locator(f"{ANSWER} .answer").text_content() or ""
    page.click(".message__continue")
    expect(page.locator(RUNNING)).to_have_count(1)
    assert shown(page).startswith("".join(stopped.split()))
    all_ended(page)
    assert shown(page) == expected(LONG_ANSWER)
    assert page.locator(ANSWER).count() == 1
    page.click(".latency-line")
    expect(page.locator(".timeline__turn")).to_have_count(2)
    expect(page.locator(".timeline__title").last).to_contain_text("Gone on with")
    page.reload()
    assert shown(page) == expected(LONG_ANSWER)


def test_the_line_opens_to_where_the_time_went(page: Page) -> None:
    ready(page)
    say(page, f"{REPEAT}some words in a second answer")
    line = page.locator(".latency-line").last
    expect(line).to_contain_text(re.compile(r"restored [\d,]+ tokens in 38 ms"))
    expect(line).to_contain_text(re.compile(r"first token [\d,]+ ms, [\d.,]+ tokens/s"))
    steps = page.locator(".timeline").last.locator(".timeline__step")
    expect(steps.first).to_be_hidden()
    line.focus()
    page.keyboard.press("Enter")
    expect(steps).to_have_text(
        [
            re.compile(r"Queued\s+3 ms"),
            re.compile(
                r"Restored\s+38 ms\s+[\d,]+ tokens, [\d,]+ KiB; disk 20 ms, computing 10 ms; "
                r"predicted 36 ms, took 38 ms; layers: 30 kv"
            ),
            re.compile(r"Waited\s+14 ms\s+for steps of other chats"),
            re.compile(r"Read\s+41 ms\s+[\d,]+ new"),
            re.compile(r"First token\s+after [\d,]+ ms"),
            re.compile(r"Answered\s+804 ms\s+\d+ tokens, [\d.]+/s; between two 31 ms"),
        ]
    )
    spans = page.locator(".timeline").last.locator(".timeline__span")
    widths = spans.evaluate_all("(all) => all.map((one) => Number(one.getAttribute('width')))")
    assert len(widths) == 5
    assert 900 < sum(widths) <= 1000
    assert max(widths) == widths[-1], "the answer itself took longest"


def test_what_waits_for_the_end_cannot_be_pressed_meanwhile(page: Page) -> None:
    ready(page)
    page.fill("#composer-text", SLOWLY)
    page.press("#composer-text", "Enter")
    expect(page.locator(RUNNING)).to_have_count(1)
    expect(page.locator(".message__again").first).to_be_hidden()
    expect(page.locator(".edit__open").first).to_be_hidden()
    page.keyboard.press("Escape")
    all_ended(page)
    expect(page.locator(".message__again").first).to_be_visible()


def test_two_tabs_show_the_same_version(new_context: Contexts) -> None:
    context, _ = new_context(viewport={"width": 1000, "height": 700})
    page = context.new_page()
    ready(page, "one")
    other = context.new_page()
    other.goto(page.url)
    edit(page, 0, f"{REPEAT}eins")
    all_ended(page)
    other.bring_to_front()
    expect(other.locator(PLACE)).to_have_text("2 / 2")
    expect(other.locator(ANSWER)).to_contain_text("eins")
    other.click("#previous-0")
    expect(other.locator(ANSWER)).to_contain_text("one")
    page.bring_to_front()
    expect(page.locator(PLACE)).to_have_text("1 / 2")
    expect(page.locator(ANSWER)).to_contain_text("one")


@pytest.mark.parametrize("viewport", [{"width": 1000, "height": 700}])
def test_all_of_it_works_without_scripts(new_context: Contexts, viewport: dict[str, int]) -> None:
    context, _ = new_context(viewport=viewport, java_script_enabled=False)
    page = context.new_page()

    def settled() -> None:
        for _ in range(100):
            if page.locator(RUNNING).count() == 0:
                return
            page.wait_for_timeout(100)
            page.reload()
        raise AssertionError("the answer does not end")

    page.goto("/")
    page.fill("#composer-text", f"{REPEAT}one")
    page.click(".composer__send")
    settled()
    page.click(".edit__open")
    page.click(".edit .later")
    page.fill(".edit__text", f"{REPEAT}eins")
    page.click(".edit__send")
    settled()
    assert page.locator(f"{ANSWER} .answer").inner_text().strip() == "eins"
    page.click("#previous-0")
    assert page.locator(f"{ANSWER} .answer").inner_text().strip() == "one"
    page.click(".message__again")
    settled()
    expect(page.locator(PLACE)).to_have_text(["1 / 2", "2 / 2"])
    page.locator(".latency-line").last.click()
    page.locator(".timeline .later").last.click()
    expect(page.locator(".timeline__step").first).to_contain_text("Queued")
    page.click("text=Back to the chat")
    page.locator(".compare summary").last.click()
    page.locator(".compare .later").last.click()
    page.locator(".compare__choices button").nth(1).click()
    settled()
    expect(page.locator(".candidates .message")).to_have_count(3)
    page.click("#take-3")
    expect(page.locator(".candidates__hint")).to_contain_text("answer 3")
    page.fill("#composer-text", SLOWLY)
    page.click(".composer__send")
    page.fill("#composer-text", f"{REPEAT}queued")
    page.click(".composer__send")
    expect(page.locator(".queued__text")).to_have_text(f"{REPEAT}queued")
    page.fill("#composer-text", "more")
    page.click(".queued__withdraw")
    expect(page.locator("#composer-text")).to_have_value(f"{REPEAT}queued\n\nmore")
    while not page.locator(f"{ANSWER} .answer").nth(-2).inner_text().strip():
        page.reload()
    page.click(".message__stop")
    page.click(".message__continue")
    settled()
    body = page.locator(f"{ANSWER} .answer").last
    assert re.sub(r"\s+", "", body.text_content() or "") == expected(LONG_ANSWER)

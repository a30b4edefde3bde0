"""Everyone can use it: axe-core on every page and state, focus, announcements, motion, zones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import DONE, RUNNING, SEND, begin, expected, shown
from tests.e2e.scripted_server import BREAK, HOLD, LONG_ANSWER, REPEAT
from tests.e2e.server_process import ROOT

Contexts = Callable[..., tuple[BrowserContext, Any]]
AXE = (ROOT / "node_modules" / "axe-core" / "axe.min.js").read_text()


class Axe:
    """Runs axe-core on a page and keeps what it finds."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.faults: list[tuple[str, str, str, str]] = []

    def look(self, state: str) -> None:
        """Check the page as it is now."""
        self._page.wait_for_timeout(250)  # colours in transition have no contrast to measure
        self._page.evaluate(AXE)
        result = self._page.evaluate("axe.run(document, {preload: false})")
        assert len(result["passes"]) > 10, state
        for violation in result["violations"]:
            for node in violation["nodes"]:
                why = node["failureSummary"].splitlines()[-1].strip()
                self.faults.append((state, violation["id"], node["html"][:120], why))


@pytest.fixture(params=["light", "dark"])
def axe(request: pytest.FixtureRequest, new_context: Contexts) -> Iterator[tuple[Page, Axe]]:
    context, trouble = new_context(color_scheme=request.param)
    trouble.expected.append(re.compile("style-src|inline style"))  # axe measures with styles
    trouble.expected.append(re.compile("status of [45]"))  # the pages of refusals and faults
    page = context.new_page()
    axe = Axe(page)
    yield page, axe
    assert axe.faults == []


def test_every_page_is_clean(axe: tuple[Page, Axe]) -> None:
    page, look = axe[0], axe[1].look
    page.goto("/")
    look("first visit")
    begin(page, "Tell me everything")
    expect(page.locator(DONE)).to_have_count(1)
    look("chat")
    chat = page.url
    for path in ("/", "/latency", f"{chat}/latency", "/chats/none"):
        page.goto(path)
        look(path)


def test_every_refusal_is_clean(axe: tuple[Page, Axe]) -> None:
    page, look = axe[0], axe[1].look
    page.goto("/")
    token = page.locator("[name=_csrf_token]").first.input_value()
    for title, fields in (
        ("Refused", {"text": "without the page's token"}),
        ("Too long", {"text": "x" * 3_000_000, "_csrf_token": token}),
    ):
        page.goto("/")
        page.evaluate(SEND, ["/chats", fields])
        expect(page.locator("h1")).to_have_text(title)
        look(title)


def test_the_page_of_a_fault_is_clean(axe: tuple[Page, Axe]) -> None:
    page, look = axe[0], axe[1].look
    begin(page, f"{BREAK} the engine's figures")
    expect(page.locator(DONE)).to_have_count(1)
    response = page.goto("/operator")
    assert response is not None
    assert response.status == 500
    expect(page.locator("main")).to_contain_text("The server failed to do this")
    look("a fault")
    page.goto("/operator")
    expect(page.locator("h1")).to_have_text("Operator")


def test_what_opens_at_a_message_is_clean_as_a_page_too(axe: tuple[Page, Axe]) -> None:
    page, look = axe[0], axe[1].look
    begin(page, f"{REPEAT}hello")
    expect(page.locator(DONE)).to_have_count(1)
    asked, answered = (
        page.locator(f".message--{role}").first.get_attribute("id")
        for role in ("user", "assistant")
    )
    assert asked is not None
    assert answered is not None
    for message, part in ((asked, "edit"), (answered, "again"), (answered, "timeline")):
        page.goto(f"/messages/{message.removeprefix('message-')}/{part}")
        expect(page.locator("a", has_text="Back to the chat")).to_be_visible()
        look(part)


def test_every_state_of_a_chat_is_clean(axe: tuple[Page, Axe]) -> None:
    page, look = axe[0], axe[1].look
    begin(page, f"{HOLD}restoring")
    expect(page.locator(".message__status progress")).to_have_count(1)
    look("restoring")
    page.keyboard.press("Escape")
    expect(page.locator(".message__status")).to_contain_text("Stopping")
    look("stopping")
    expect(page.locator(RUNNING)).to_have_count(0)
    look("stopped")
    page.fill("#composer-text", "Too long. " * 9000)
    page.press("#composer-text", "Enter")
    page.wait_for_selector(".problem")
    look("refused")
    page.fill("#composer-text", "Tell me everything")
    page.press("#composer-text", "Enter")
    page.wait_for_selector(f"{RUNNING} h1")
    page.mouse.wheel(0, -200)
    look("answering")
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)
    page.click(".chat-menu__toggle")
    look("menu of a chat")
    page.click(".topbar__help")
    look("list of keys")


def test_the_drawer_is_clean(new_context: Contexts) -> None:
    context, trouble = new_context(viewport={"width": 380, "height": 740})
    trouble.expected.append(re.compile("style-src|inline style"))
    page = context.new_page()
    begin(page, f"{REPEAT}hello")
    expect(page.locator(DONE)).to_have_count(1)
    page.click(".topbar__toggle")
    axe = Axe(page)
    axe.look("drawer")
    assert axe.faults == []
    for name, path in (("Operator", "/operator"), ("Assistants", "/assistants")):
        page.get_by_role("link", name=name, exact=True).click()  # the one that is seen
        page.wait_for_url(f"**{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        page.go_back()
        page.click(".topbar__toggle")


def focused(page: Page) -> str:
    """What has the focus, in words."""
    text: str = page.evaluate(
        """() => {
          const one = document.activeElement;
          return (one.getAttribute("aria-label") ?? one.textContent.trim()) || one.id;
        }"""
    )
    return text


def test_the_focus_goes_from_top_to_end_and_can_be_seen(page: Page) -> None:
    begin(page, f"{REPEAT}hello")
    expect(page.locator(DONE)).to_have_count(1)
    chat = page.url
    page.goto(f"{chat}/latency")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the content"
    box = page.locator(".skip-link").bounding_box()
    assert box is not None
    assert box["y"] >= 0, "it is seen when it has the focus"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.goto(chat)
    page.focus(".skip-link")
    names: list[str] = []
    for _ in range(40):
        names.append(focused(page))
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        style = page.evaluate(
            """() => {
              const one = document.activeElement, style = getComputedStyle(one);
              const field = one.closest(".composer");
              return [style.outlineStyle, field ? getComputedStyle(field).boxShadow : "none"];
            }"""
        )
        assert style[0] != "none" or style[1] != "none", f"unseen focus, after {names[-1]}"
    wanted = ["Skip to the content", "Rejoinder", "New chat", "Keyboard shortcuts"]
    order = [names.index(name) for name in wanted]
    assert order == sorted(order)
    assert names.index("composer-text") > names.index("Keyboard shortcuts")
    assert any("Send" in name for name in names[names.index("composer-text") :])


def test_only_finished_blocks_are_announced(page: Page) -> None:
    page.goto("/")
    page.add_init_script(
        """addEventListener("DOMContentLoaded", () => {
          window.__said = [];
          const region = document.getElementById("announcer");
          new MutationObserver(() => window.__said.push(region.textContent))
            .observe(region, {childList: true, characterData: true, subtree: true});
        });"""
    )
    begin(page, "Tell me everything")
    expect(page.locator(DONE)).to_have_count(1)
    said = [re.sub(r"\s+", "", text) for text in page.evaluate("() => window.__said")]
    assert said
    assert said[-1].endswith("Theanswerhasended.")
    whole = expected(LONG_ANSWER)
    for text in said:
        part = text.removesuffix("Theanswerhasended.")
        assert part in whole, "whole blocks of the answer, in its order"
    paragraph = re.sub(r"\s+", "", LONG_ANSWER.split("\n\n")[-2])
    assert any(paragraph in text for text in said)
    assert page.locator("#announcer").get_attribute("aria-live") == "polite"
    assert page.locator("[aria-live]").count() == 1
    assert shown(page) == whole


def test_nothing_moves_for_those_who_do_not_want_it(new_context: Contexts) -> None:
    context, _ = new_context(reduced_motion="reduce")
    page = context.new_page()
    begin(page, f"{HOLD}reading")
    expect(page.locator(".message__status")).to_contain_text("Reading")
    moving = page.evaluate("() => document.getAnimations().length")
    assert moving == 0
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)


def test_times_are_in_the_zone_of_the_reader(new_context: Contexts) -> None:
    context, _ = new_context(timezone_id="Asia/Kathmandu", locale="en-GB")
    page = context.new_page()
    begin(page, f"{REPEAT}what time is it")
    expect(page.locator(DONE)).to_have_count(1)
    page.goto(f"{page.url}/latency")
    time = page.locator(".turn__time").first
    utc = time.get_attribute("datetime")
    here = page.evaluate(
        """(utc) => new Intl.DateTimeFormat("en-GB", {dateStyle: "medium", timeStyle: "medium",
          timeZone: "Asia/Kathmandu"}).format(new Date(utc))""",
        utc,
    )
    expect(time).to_have_text(here)
    plain, _ = new_context(java_script_enabled=False, storage_state=context.storage_state())
    bare = plain.new_page()
    bare.goto(page.url)
    assert utc is not None
    expect(bare.locator(".turn__time").first).to_have_text(utc[:19].replace("T", " ") + " UTC")


SHIFTS = """
window.__shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.__shift += entry.value;
}).observe({type: "layout-shift", buffered: true});
"""
# How far any block of the answer ever moved from where it was seen first, in pixels.
PLACES = """() => {
  const places = new Map();
  window.__moved = [];
  const look = () => {
    const blocks = [...document.querySelectorAll(".message--assistant .answer > *")];
    for (const [number, block] of blocks.entries()) {
      const top = block.offsetTop;
      if (Math.abs((places.get(number) ?? top) - top) > 1)
        window.__moved.push([number, places.get(number), top, block.outerHTML.slice(0, 60)]);
      if (!places.has(number)) places.set(number, top);
    }
    requestAnimationFrame(look);
  };
  look();
}"""


@pytest.mark.parametrize("width", [1280, 380])
def test_nothing_jumps(new_context: Contexts, width: int) -> None:
    """Text that is on the page stays where it is, and pages do not move while they open."""
    context, _ = new_context(viewport={"width": width, "height": 760})
    page = context.new_page()
    page.add_init_script(SHIFTS)
    begin(page, "Tell me everything")
    page.evaluate(PLACES)
    expect(page.locator(DONE)).to_have_count(1)
    page.wait_for_timeout(300)
    assert shown(page) == expected(LONG_ANSWER)
    assert page.evaluate("() => window.__moved") == []
    chat = page.url
    for path in (chat, "/", "/latency", f"{chat}/latency"):
        page.goto(path)
        page.wait_for_timeout(500)
        assert page.evaluate("() => window.__shift") < 0.05, path

"""Hostile texts as messages and as answers, live and from history: nothing runs or loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Dialog, Page, Request, expect

from tests.e2e.pages import DONE, begin, say
from tests.e2e.scripted_server import REPEAT

# NUL is refused with the message; another control character takes its place here.
PAYLOADS: list[str] = [
    text.replace("\0", "\x01")
    for text in json.loads(Path(__file__).parents[1].joinpath("hostile_payloads.json").read_text())
]
PER_MESSAGE = 4
PER_CHAT = 7
# What nothing in a conversation may be or have, our own frame apart.
ACTIVE = """() => {
  const found = [];
  for (const element of document.querySelectorAll("#conversation .message__body *")) {
    if (element.matches("img,svg,math,iframe,object,embed,link,style,script,form,input,base,meta," +
        "video,audio,template,details,dialog,hx-partial,button:not(.code__copy)"))
      found.push(element.outerHTML);
    for (const { name, value } of element.attributes) {
      if (/^(on|hx-|data-(?!htmx-powered))|^(style|id|src|srcset|action|ping)$/.test(name))
        found.push(element.outerHTML);
      if (name === "href" && !/^(https?:|mailto:)/i.test(value)) found.push(element.outerHTML);
    }
  }
  return found;
}"""


def assert_nothing_happened(page: Page, address: str) -> None:
    assert page.evaluate("() => window.__ran") is None
    assert page.url == address
    assert page.evaluate(ACTIVE) == []
    assert page.evaluate("() => document.title") != "owned"
    assert page.locator("#composer").count() == 1


def messages() -> list[str]:
    """The payloads, a few to a message; what must be alone or first begins its own block."""
    groups = [PAYLOADS[at : at + PER_MESSAGE] for at in range(0, len(PAYLOADS), PER_MESSAGE)]
    return [REPEAT + "\n\n".join(group) for group in groups]


CHUNKS = [messages()[at : at + PER_CHAT] for at in range(0, len(messages()), PER_CHAT)]


@pytest.mark.parametrize("texts", CHUNKS, ids=range(len(CHUNKS)))
def test_payloads_are_inert_live_and_from_history(
    new_context: Callable[..., tuple[BrowserContext, Any]], texts: list[str]
) -> None:
    context, _ = new_context()
    page = context.new_page()
    dialogs: list[str] = []

    def note(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", note)
    begin(page, texts[0])
    expect(page.locator(DONE)).to_have_count(1)
    address = page.url
    assert_nothing_happened(page, address)
    for text in texts[1:]:
        say(page, text)
        assert_nothing_happened(page, address)
    page.reload()
    page.wait_for_load_state("networkidle")
    assert_nothing_happened(page, address)
    own = page.locator(".message--user .message__body").all_text_contents()
    assert own == texts
    for path in ("/", "/latency", f"{address}/latency"):  # the titles are hostile too
        page.goto(path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("() => window.__ran") is None
    assert dialogs == []
    assert context.pages == [page]


def test_a_click_on_every_link_leaves_the_page_alone(page: Page) -> None:
    """What is left clickable leads to another window, and only to allowed schemes."""
    links = [text for text in PAYLOADS if "](" in text or text.startswith("<a")]
    begin(page, REPEAT + "\n\n".join(links))
    expect(page.locator(DONE)).to_have_count(1)
    address = page.url
    page.context.route("https://example.org/**", lambda route: route.abort())
    anchors = page.locator("#conversation .answer a, #conversation .message__body a")
    assert anchors.count() > 0
    for index in range(anchors.count()):
        assert anchors.nth(index).get_attribute("target") == "_blank"
        assert anchors.nth(index).get_attribute("rel") == "noopener noreferrer nofollow"
    assert_nothing_happened(page, address)


def test_the_policy_stops_what_a_sanitiser_might_miss(
    new_context: Callable[..., tuple[BrowserContext, Any]],
) -> None:
    """Behind the sanitiser: raw payloads put into the page by hand neither run nor load."""
    context, trouble = new_context()
    page = context.new_page()
    page.goto("/")
    fates: list[tuple[str, str | None]] = []

    def note(request: Request, fate: str | None) -> None:
        if "hostile.invalid" in request.url:
            fates.append((request.url, fate))

    page.on("requestfailed", lambda request: note(request, request.failure))
    page.on("requestfinished", lambda request: note(request, "answered"))
    page.evaluate(
        """(payloads) => {
          for (const payload of payloads) {
            const box = document.createElement("div");
            document.body.append(box);
            box.innerHTML = payload;
          }
        }""",
        [text for text in PAYLOADS if "refresh" not in text and "<base" not in text],
    )
    page.wait_for_timeout(500)
    assert page.evaluate("() => window.__ran") is None
    stopped = {fate for _, fate in fates}
    assert "csp" in stopped, "asked for, and blocked before it was sent"
    assert stopped <= {"csp", "origin"}  # an SVG of another origin is no <use>, policy or not
    assert trouble.found, "the browser reported what it blocked"
    trouble.found.clear()

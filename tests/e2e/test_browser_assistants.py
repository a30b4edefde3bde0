"""Assistants and the operator's page in a real browser: with scripts and without, on any screen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Dialog, FilePayload, Page, expect

from tests.e2e.pages import DONE
from tests.e2e.scripted_server import REPEAT
from tests.e2e.test_browser_a11y import Axe, axe
from tests.e2e.test_browser_narrow import CUT_OFF

__all__ = ["axe"]  # the fixture

Contexts = Callable[..., tuple[BrowserContext, Any]]
RULES: FilePayload = {
    "name": "rules.md",
    "mimeType": "text/markdown",
    "buffer": b"# Rules\n\nNo shoes.\n",
}
REFUSED = re.compile("status of 4")
TOKENS = "#prefix-cost dd >> nth=0"


@pytest.fixture
def page(new_context: Contexts) -> Page:
    """A browser that was never here, and may be refused things."""
    context, trouble = new_context(viewport={"width": 1280, "height": 800})
    trouble.expected.append(REFUSED)
    return context.new_page()


def write(page: Page, name: str, prompt: str = "You know the house.") -> None:
    page.goto("/assistants/new")
    page.fill("[name=name]", name)
    page.fill("[name=system_prompt]", prompt)


def save(page: Page) -> str:
    """Returns the assistant's page."""
    page.click("#save")
    page.wait_for_url(re.compile(r"/assistants/[0-9a-f]{32}\?done="))
    return page.url.split("?")[0]


def begin_with(page: Page, assistant: str) -> str:
    """A chat with an assistant; returns its page."""
    page.goto(assistant)
    page.click(".asst__new")
    expect(page.locator(".assistants__choice:has(:checked)")).to_have_count(1)
    page.fill("#composer-text", f"{REPEAT}yes")
    page.press("#composer-text", "Enter")
    page.wait_for_url(re.compile(r"/chats/"))
    expect(page.locator(DONE)).to_have_count(1)
    return page.url


def test_counts_follow_what_is_written_and_uploaded(page: Page) -> None:
    write(page, "Counted", "word " * 10)
    expect(page.locator(TOKENS)).to_contain_text(re.compile(r"^\s*1\d "))
    page.fill("[name=system_prompt]", "word " * 300)
    expect(page.locator(TOKENS)).to_contain_text(re.compile(r"^\s*30\d "))
    page.set_input_files("[name=files]", [RULES])
    expect(page.locator("#documents summary").first).to_contain_text("rules.md")
    expect(page.locator(TOKENS)).to_contain_text(re.compile(r"^\s*3[12]\d "))
    page.click("text=Paste a text")
    paste = page.locator(".asst__document").last
    paste.locator("[name=document_name]").fill("tea")
    paste.locator("[name=document_text]").fill("Tea is at four. " * 20)
    page.click("text=Add it")
    expect(page.locator("#documents summary")).to_have_count(3)
    page.locator(".asst__document").first.locator("summary").click()
    page.check("[name=document_left_out] >> nth=0")
    expect(page.locator(TOKENS)).to_contain_text(re.compile(r"^\s*4\d\d "))
    save(page)
    expect(page.locator("summary:has-text('tea')")).to_have_count(1)
    expect(page.locator("summary:has-text('rules.md')")).to_have_count(0)


def test_too_long_a_text_is_told_before_and_refused_after(page: Page) -> None:
    write(page, "Too long", "word " * 5000)
    expect(page.locator(".asst__over")).to_contain_text("tokens too many")
    page.click("#save")
    expect(page.locator(".problem__text")).to_contain_text("at most 4,096 may be shared")
    assert page.input_value("[name=system_prompt]") == "word " * 5000
    page.fill("[name=system_prompt]", "word")
    expect(page.locator(".asst__over")).to_have_count(0)
    save(page)


def test_versions_and_a_chat_that_moves(page: Page) -> None:
    write(page, "Versioned")
    assistant = save(page)
    chat = begin_with(page, assistant)
    expect(page.locator(".chat__assistant")).to_have_text("Versioned, version 1")
    page.goto(f"{assistant}/edit")
    page.fill("[name=system_prompt]", "Another prompt")
    save(page)
    page.goto(chat)
    expect(page.locator(".chat__assistant")).to_contain_text("new chats begin with version 2")
    page.click("text=Move to version 2")
    expect(page.locator(".chat__assistant")).to_have_text("Versioned, version 2")
    expect(page.locator(".message--assistant .answer")).to_contain_text("yes")
    page.fill("#composer-text", f"{REPEAT}still here")
    page.press("#composer-text", "Enter")
    expect(page.locator(DONE)).to_have_count(2)
    begin_with(page, assistant)
    page.goto(assistant)
    expect(page.locator("main")).to_contain_text("Used by 2 active chats, KV held once")


def test_two_tabs_lose_nothing(page: Page) -> None:
    write(page, "Two tabs")
    assistant = save(page)
    page.goto(f"{assistant}/edit")
    other = page.context.new_page()
    other.goto(f"{assistant}/edit")
    other.fill("[name=system_prompt]", "From the other tab")
    save(other)
    page.fill("[name=system_prompt]", "From this tab")
    page.click("#save")
    expect(page.locator(".problem")).to_contain_text("changed in another tab")
    assert page.input_value("[name=system_prompt]") == "From this tab"
    expect(page.locator("pre").first).to_have_text("From the other tab")
    left: list[str] = []

    def stay(dialog: Dialog) -> None:
        left.append(dialog.type)
        dialog.dismiss()

    page.on("dialog", stay)
    page.click("text=Cancel")
    page.wait_for_timeout(200)
    assert left == ["beforeunload"], "what was written is not left unasked"
    page.click("text=Save mine all the same")
    page.wait_for_url(re.compile("done=saved"))
    expect(page.locator("pre").first).to_have_text("From this tab")


def test_all_of_it_works_without_scripts(new_context: Contexts) -> None:
    context, trouble = new_context(java_script_enabled=False)
    trouble.expected.append(REFUSED)
    page = context.new_page()
    write(page, "No scripts")
    page.set_input_files("[name=files]", [RULES])
    page.click("text=Check")
    expect(page.locator(".asst__document summary").first).to_contain_text("rules.md")
    expect(page.locator(TOKENS)).to_contain_text("of at most")
    page.fill("[name=temperature]", "3")
    page.click("#save")
    expect(page.locator(".problem")).to_contain_text("is not a number from 0 to 2")
    page.fill("[name=temperature]", "0.5")
    page.click("#save")
    assistant = page.url.split("?")[0]
    expect(page.locator("main")).to_contain_text("Temperature 0.5.")
    page.click("text=Make my own copy")
    expect(page.locator("h1")).to_have_text("No scripts (copy)")
    page.click("text=Publish for everybody")
    expect(page.locator(".asst__facts")).to_contain_text("everybody sees it")
    page.click("text=Make it private")
    page.click("summary:has-text('Delete')")
    page.click("button:has-text('Delete')")
    expect(page.locator(".asst__note")).to_contain_text("It is deleted.")
    page.goto(assistant)
    page.click(".asst__edit")
    expect(page.locator("[name=document_text]").first).to_have_value("# Rules\n\nNo shoes.\n")
    page.goto("/operator")
    page.click("text=Collect stale checkpoints")
    expect(page.locator(".asst__note")).to_contain_text("0 MiB were freed.")
    page.click("text=Check now")
    for _ in range(60):
        if page.locator("#check-report:has-text('all is well')").count():
            return
        page.wait_for_timeout(500)
        page.goto("/operator")
    raise AssertionError("the check did not end")


def test_the_operators_page_checks_in_the_background(page: Page) -> None:
    page.goto("/operator")
    page.click("text=Check now")
    expect(page.locator("#check-report")).to_contain_text("The check is running.")
    expect(page.locator("#check-report")).to_contain_text("all is well", timeout=60_000)
    expect(page.locator("#check-report li").first).to_contain_text("database: ")


def test_nothing_is_cut_off_on_a_phone(new_context: Contexts) -> None:
    context, _ = new_context(viewport={"width": 380, "height": 740})
    page = context.new_page()
    write(page, "W" * 80, "W" * 300)
    long_named: FilePayload = {**RULES, "name": f"{'long' * 20}.md"}
    page.set_input_files("[name=files]", [long_named])
    expect(page.locator("#documents summary")).to_have_count(2)
    assistant = save(page)
    chat = begin_with(page, assistant)
    page.goto(f"{assistant}/edit")
    page.fill("[name=system_prompt]", "x")
    save(page)
    for path in (assistant, f"{assistant}/edit", "/assistants", "/", chat, "/operator"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, path
        assert page.evaluate("document.getElementById('main').scrollWidth") <= 380, path
        assert page.evaluate(CUT_OFF, 380) == [], path


def test_every_page_is_clean(axe: tuple[Page, Axe]) -> None:
    page, look = axe[0], axe[1].look
    write(page, "Clean")
    page.set_input_files("[name=files]", [RULES])
    expect(page.locator("#documents summary")).to_have_count(2)
    for summary in page.locator(".asst details > summary").all():
        summary.click()
    look("new assistant")
    assistant = save(page)
    look("made")
    page.goto(f"{assistant}/edit")
    page.fill("[name=system_prompt]", "word " * 5000)
    expect(page.locator(".asst__over")).to_have_count(1)
    page.fill("[name=temperature]", "7")
    page.click("#save")
    page.wait_for_selector(".problem")
    look("refused")
    page.on("dialog", lambda dialog: dialog.accept())
    begin_with(page, assistant)
    page.goto(f"{assistant}/edit")
    page.fill("[name=system_prompt]", "Another")
    save(page)
    page.goto("/assistants")
    look("list")
    page.click(".chat-list__link >> nth=0")
    page.wait_for_selector(".chat__move")
    look("chat with a move")
    page.goto("/operator")
    page.click("text=Check now")
    expect(page.locator("#check-report")).to_contain_text("all is well", timeout=60_000)
    look("operator")

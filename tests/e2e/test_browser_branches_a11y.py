"""axe-core on what a conversation shows beyond questions and answers."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.e2e.pages import DONE, RUNNING, begin
from tests.e2e.scripted_server import REPEAT, SLOWLY
from tests.e2e.test_browser_a11y import Axe, axe

__all__ = ["axe"]  # the fixture


def test_branches_candidates_and_queue_are_clean(axe: tuple[Page, Axe]) -> None:
    page, look = axe[0], axe[1].look
    begin(page, f"{REPEAT}one")
    expect(page.locator(DONE)).to_have_count(1)
    page.click(".latency-line")
    look("timeline")
    page.click(".compare summary")
    look("compare")
    page.keyboard.press("Escape")
    page.click(".edit__open")
    look("edit")
    page.fill(".edit__text", f"{REPEAT}{'a long message ' * 150}")
    page.click(".edit__send")
    expect(page.locator(RUNNING)).to_have_count(0)
    look("versions, long message")
    page.fill("#composer-text", SLOWLY)
    page.select_option(".composer__answers select", "2")
    page.press("#composer-text", "Enter")
    page.wait_for_selector(".candidates h1")
    page.fill("#composer-text", f"{REPEAT}after all of them")
    page.press("#composer-text", "Enter")
    page.wait_for_selector(".queued")
    look("candidates that run, queued message")
    page.click(".queued__withdraw")
    expect(page.locator(".queued")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)
    look("candidates")

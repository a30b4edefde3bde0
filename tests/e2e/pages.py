"""What several browser tests do on the pages."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

DONE = ".latency-line"
RUNNING = ".message--running"
ANSWER = ".message--assistant"


def begin(page: Page, text: str) -> None:
    """Write the first message of a new chat."""
    page.goto("/")
    page.fill("#composer-text", text)
    page.press("#composer-text", "Enter")
    page.wait_for_url(re.compile(r"/chats/[0-9a-f]+"))


def say(page: Page, text: str) -> None:
    """Write a further message and wait for the end of its answer."""
    turns = page.locator(DONE).count()
    page.fill("#composer-text", text)
    page.press("#composer-text", "Enter")
    expect(page.locator(DONE)).to_have_count(turns + 1)

"""What several browser tests do on the pages."""

from __future__ import annotations

import re
from html import unescape

from playwright.sync_api import Page, expect

from app.rendering import render_markdown

DONE = ".latency-line"
RUNNING = ".message--running"
ANSWER = ".message--assistant"
# Sends fields to an address as a form of the page would.
SEND = """([path, fields]) => {
  const form = document.createElement("form");
  form.method = "post";
  form.action = path;
  for (const [name, value] of Object.entries(fields)) {
    const field = document.createElement("textarea");
    field.name = name;
    field.value = value;
    form.append(field);
  }
  document.body.append(form);
  form.submit();
}"""


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


def shown(page: Page, number: int = 0) -> str:
    """The text of an answer as the page holds it, without white space and our buttons."""
    text = (
        page.locator(ANSWER)
        .nth(number)
        .evaluate(
            """(message) => {
          const copy = message.cloneNode(true);
          copy.querySelectorAll(".code__copy, footer").forEach((extra) => extra.remove());
          return copy.textContent;
        }"""
        )
    )
    return re.sub(r"\s+", "", text)


def expected(markdown: str) -> str:
    """The same of the markdown's own HTML, its tags cut out."""
    return re.sub(r"\s+", "", unescape(re.sub(r"<[^>]+>", "", render_markdown(markdown))))

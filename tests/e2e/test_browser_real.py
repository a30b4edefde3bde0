"""The whole service as people run it: command line, engine process, real model, browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.pages import ANSWER, DONE, RUNNING, begin
from tests.e2e.server_process import ServerProcess

ASKED = "Explain in one paragraph what a lighthouse is."
WAIT_MS = 240_000  # 512 tokens at most, on a machine that is busy with other things
RUN = "from app.cli import main; main()"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("real")
    options = ["--migrate", "--port", "0", "--data-dir", str(home / "data")]
    command = ["-c", RUN, "serve", *options, "--model", str(model_dir)]
    process = ServerProcess(command, home / "log", wait_s=150)
    yield process
    process.stop()


def text_of(page: Page, number: int) -> str:
    return page.locator(f"{ANSWER}").nth(number).locator(".answer").first.inner_text()


def grown(page: Page, than: int) -> int:
    """Wait until the running answer has more text than that; return how much."""
    handle = page.wait_for_function(
        """(than) => {
          const bodies = document.querySelectorAll(".message--running .answer");
          const length = [...bodies].reduce((sum, body) => sum + body.textContent.length, 0);
          return length > than && length;
        }""",
        arg=than,
        timeout=WAIT_MS,
    )
    return int(handle.json_value())


def test_a_first_visit(page: Page) -> None:
    """Write, watch it grow, reload in mid-answer, stop another, look at the latency pages."""
    begin(page, ASKED)
    first = grown(page, 0)
    second = grown(page, first)
    third = grown(page, second)
    assert third > second > first
    page.reload()
    expect(page.locator(RUNNING)).to_have_count(1)
    assert grown(page, third - 1) >= third
    expect(page.locator(DONE)).to_have_count(1, timeout=WAIT_MS)
    whole = text_of(page, 0)
    assert page.locator(".message").count() == 2
    page.reload()
    assert text_of(page, 0) == whole
    opening = whole[:60]
    assert page.locator(".conversation").inner_text().count(opening) == 1

    page.fill(
        "#composer-text", "Write a long story about a lighthouse keeper, with many paragraphs."
    )
    page.press("#composer-text", "Enter")
    grown(page, 20)
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)
    stopped = text_of(page, 1)
    assert stopped
    page.wait_for_timeout(500)
    page.reload()
    assert text_of(page, 1) == stopped
    expect(page.locator(".message__note--stopped")).to_have_count(1)

    page.click(".chat__latency")
    expect(page.locator(".chart canvas").first).to_be_visible()
    page.goto("/latency")
    expect(page.locator(".chart canvas").first).to_be_visible()
    assert re.search(r"\d+ ms", page.locator("main").inner_text())


def test_candidates_and_an_answer_gone_on_with(page: Page) -> None:
    """Two answers share the chat; one is taken; a stopped one goes on as if it never stopped."""
    begin(page, "Say hello.")
    grown(page, 1)
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0, timeout=WAIT_MS)
    page.fill("#composer-text", "Write a long story about a lighthouse keeper, in ten chapters.")
    page.select_option(".composer__answers select", "2")
    page.press("#composer-text", "Enter")
    page.wait_for_function(
        """() => [...document.querySelectorAll(".candidates .message")].filter((one) =>
          [...one.querySelectorAll(".answer")].some((body) => body.textContent.length > 10)
        ).length === 2""",
        timeout=WAIT_MS,
    )
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0, timeout=WAIT_MS)
    lines = page.locator(".candidates .latency-line")
    expect(lines).to_have_count(2)
    expect(lines.nth(1)).to_contain_text("tokens still in memory")
    texts = [page.locator(".candidates .answer").nth(n).inner_text() for n in (0, 1)]
    assert texts[0] != texts[1], "each has its own noise"
    page.click("#take-2")
    expect(page.locator(".message--chosen")).to_contain_text("Answer 2")
    page.locator(".message__continue:visible").click()
    expect(page.locator(RUNNING)).not_to_have_count(0)
    page.wait_for_function(
        "(than) => document.querySelector('.candidates').textContent.length > than + 40",
        arg=page.locator(".candidates").evaluate("(all) => all.textContent.length"),
        timeout=WAIT_MS,
    )
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0, timeout=WAIT_MS)
    longer = page.locator(".candidates .answer").nth(1).inner_text()
    assert longer.startswith(texts[1].rstrip()[:-3])
    assert len(longer) > len(texts[1])
    assert page.locator(".candidates .answer").nth(0).inner_text() == texts[0]

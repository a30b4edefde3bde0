"""Streams as life treats them: restarts, lost networks, sleep, hidden and many tabs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, Request, expect

from tests.e2e.pages import DONE, RUNNING, begin, expected, say, shown
from tests.e2e.scripted_server import HOLD, LONG_ANSWER, REPEAT
from tests.e2e.server_process import ServerProcess

Contexts = Callable[..., tuple[BrowserContext, Any]]
HIDEABLE = """
window.__hidden = false;
Object.defineProperty(document, "hidden", {get: () => window.__hidden});
Object.defineProperty(document, "visibilityState",
  {get: () => window.__hidden ? "hidden" : "visible"});
"""
HIDE = "() => { window.__hidden = true; document.dispatchEvent(new Event('visibilitychange')); }"
SHOW = "() => { window.__hidden = false; document.dispatchEvent(new Event('visibilitychange')); }"


def streams_of(page: Page) -> tuple[list[Request], list[Request]]:
    """The event streams that a page asks for, and those of them that have ended."""
    asked: list[Request] = []
    ended: list[Request] = []

    def note(to: list[Request]) -> Callable[[Request], None]:
        return lambda request: to.append(request) if request.url.endswith("/events") else None

    page.on("request", note(asked))
    for end in ("requestfinished", "requestfailed"):
        page.on(end, note(ended))
    return asked, ended


def wait_for(page: Page, condition: Callable[[], bool]) -> None:
    """Wait until something on this side is so."""
    for _ in range(200):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it did not come to pass")


def test_waiting_is_shown_with_progress(page: Page) -> None:
    begin(page, f"{HOLD}restoring")
    status = page.locator(".message__status")
    expect(status).to_contain_text("Restoring 60 of 120 tokens")
    bar = status.locator("progress")
    assert bar.evaluate("(bar) => bar.position") == 0.5
    page.reload()
    expect(status).to_contain_text("Restoring 60 of 120 tokens")
    page.click(".message__stop")
    expect(page.locator(RUNNING)).to_have_count(0)
    page.fill("#composer-text", f"{HOLD}reading")
    page.press("#composer-text", "Enter")
    expect(status).to_contain_text("Reading the prompt, 60 of 120 tokens")
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)


def test_stopping_is_shown_until_the_engine_confirms_it(page: Page) -> None:
    """To every page that shows the answer, and asked for only once."""
    begin(page, f"{HOLD}reading")
    expect(page.locator(".message__status")).to_contain_text("Reading")
    other = page.context.new_page()
    other.goto(page.url)
    stops: list[str] = []
    page.on("request", lambda r: stops.append(r.url) if r.url.endswith("/stop") else None)
    page.click(".message__stop")
    for each in (page, other):
        expect(each.locator(".message__status")).to_have_text("Stopping")
    page.keyboard.press("Escape")
    for each in (page, other):
        expect(each.locator(RUNNING)).to_have_count(0)
        expect(each.locator(".message__note--stopped")).to_have_count(1)
    assert len(stops) == 1


def test_sleep_and_wake(page: Page) -> None:
    """A connection that died in the meantime gives no sign of it: silence is the sign."""
    page.clock.install()
    begin(page, f"{HOLD}reading")
    page.wait_for_function("() => document.querySelector('.message--running')?._htmx?.sse?.reader")
    # However long this test takes, for the page a second passes, and then what is said here. The
    # server's last word may be 10 s old; 25 s without one are a sign.
    now_s = page.evaluate("() => Date.now()") / 1000
    page.clock.pause_at(datetime.fromtimestamp(now_s + 1, UTC))
    asked, ended = streams_of(page)
    page.clock.fast_forward(12_000)
    page.wait_for_timeout(300)
    assert (asked, ended) == ([], [])
    page.clock.fast_forward(30_000)
    page.clock.resume()
    wait_for(page, lambda: len(asked) == 1)
    page.keyboard.press("Escape")
    expect(page.locator(RUNNING)).to_have_count(0)
    assert len(asked) == 1


def test_a_network_that_was_away(new_context: Contexts) -> None:
    """Text that came meanwhile is there once, soon after the network is back."""
    context, trouble = new_context()
    trouble.expected.append(re.compile("ERR_|Failed to fetch|network"))
    page = context.new_page()
    begin(page, "Tell me everything")
    page.wait_for_selector(f"{RUNNING} h1")
    drop = True
    page.route("**/events", lambda route: route.abort() if drop else route.continue_())
    # Playwright leaves streams alone that are open already: break this one as a network would.
    page.evaluate("() => document.querySelector('.message--running')._htmx.sse.reader.cancel()")
    expect(page.locator(".message--unreachable")).to_have_count(1)
    expect(page.locator(".message__status")).to_have_css("display", "flex")
    page.wait_for_timeout(1500)
    drop = False
    page.evaluate("() => dispatchEvent(new Event('online'))")
    expect(page.locator(DONE)).to_have_count(1)
    assert shown(page) == expected(LONG_ANSWER)


def test_a_hidden_tab_lets_go_and_has_all_the_text_when_it_is_seen_again(
    new_context: Contexts,
) -> None:
    context, _ = new_context()
    page = context.new_page()
    page.add_init_script(HIDEABLE)
    asked, ended = streams_of(page)
    begin(page, "Tell me everything")
    page.wait_for_selector(f"{RUNNING} h1")
    page.evaluate(HIDE)
    wait_for(page, lambda: len(ended) == 1)
    there = len(shown(page))
    page.wait_for_timeout(1200)
    assert len(shown(page)) == there, "nothing comes while nobody looks"
    assert len(asked) == 1
    page.evaluate(SHOW)
    expect(page.locator(DONE)).to_have_count(1)
    assert shown(page) == expected(LONG_ANSWER)
    assert len(asked) == 2


def test_seven_answering_tabs_and_an_eighth_that_stops_one(new_context: Contexts) -> None:
    """All seven are seen at once, as windows side by side are: the worst case of HTTP/1.1."""
    context, _ = new_context()
    pages = [context.new_page() for _ in range(7)]
    for page in pages:
        begin(page, f"{HOLD}reading")
        expect(page.locator(RUNNING)).to_have_count(1)
    eighth = context.new_page()
    eighth.goto(pages[3].url)
    expect(eighth.locator(".message__status")).to_contain_text("Reading")
    eighth.click(".message__stop")
    expect(eighth.locator(".message__note--stopped")).to_have_count(1)
    expect(pages[3].locator(".message__note--stopped")).to_have_count(1)
    # the others are alive: each gets its end
    for page in (pages[0], pages[6]):
        page.click(".message__stop")
        expect(page.locator(".message__note--stopped")).to_have_count(1)
    for page in pages:
        if page.locator(RUNNING).count():
            page.keyboard.press("Escape")
    for page in pages:
        expect(page.locator(RUNNING)).to_have_count(0)


def test_another_browser_catches_up_when_it_gets_the_focus(new_context: Contexts) -> None:
    here, _ = new_context()
    first = here.new_page()
    begin(first, f"{REPEAT}one")
    expect(first.locator(DONE)).to_have_count(1)
    elsewhere, trouble = new_context(storage_state=here.storage_state())
    trouble.expected.append(re.compile("304"))
    second = elsewhere.new_page()
    second.clock.install()
    second.goto(first.url)
    second.fill("#composer-text", "a draft")
    answers: list[int] = []

    def look_away_and_back() -> None:
        """For six seconds; returns when the page has looked."""
        second.clock.fast_forward(6_000)
        with second.expect_response(first.url) as got:
            second.evaluate("() => dispatchEvent(new Event('focus'))")
        answers.append(got.value.status)
        second.wait_for_timeout(200)

    look_away_and_back()
    look_away_and_back()
    assert answers == [200, 304], "what did not change is not sent again"
    say(first, f"{REPEAT}two")
    look_away_and_back()
    expect(second.locator(DONE)).to_have_count(2)
    assert shown(second, 1) == "two"
    look_away_and_back()
    assert answers == [200, 304, 200, 304]
    expect(second.locator("#composer-text")).to_have_value("a draft")


def test_reading_and_sending_without_script(new_context: Contexts) -> None:
    """A whole conversation: send, look again, stop, read, send the next one."""
    context, _ = new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto("/")
    page.fill("#composer-text", f"{HOLD}reading")
    page.click(".composer__send")
    page.wait_for_url(re.compile(r"/chats/[0-9a-f]+"))
    for _ in range(20):
        page.click(".message__refresh")
        if "60 of 120" in page.locator(".message__status").inner_text():
            break
    expect(page.locator(".message__status")).to_contain_text("Reading the prompt, 60 of 120")
    page.click(".message__stop")
    expect(page.locator(".message__note--stopped")).to_have_count(1)
    page.fill("#composer-text", f"{REPEAT}**told** you")
    page.click(".composer__send")
    for _ in range(20):
        if page.locator(DONE).count() == 2:
            break
        page.goto(page.url.split("#")[0])
    expect(page.locator(".message--assistant strong")).to_have_text("told")
    for hidden in (".topbar__help", ".topbar__toggle"):
        expect(page.locator(hidden)).to_be_hidden()


@pytest.fixture
def own_server(tmp_path: Path, model_dir: Path) -> Iterator[Callable[[str], ServerProcess]]:
    """Starts a scripted server on a port, as often as asked, on one data directory."""
    script = Path(__file__).with_name("scripted_server.py")
    started: list[ServerProcess] = []

    def start(port: str) -> ServerProcess:
        command = [str(script), str(tmp_path / "data"), str(model_dir), port]
        started.append(ServerProcess(command, tmp_path / f"log{len(started)}", wait_s=60))
        return started[-1]

    yield start
    for process in started:
        process.stop()


def test_the_server_is_started_again_under_a_running_answer(
    new_context: Contexts, own_server: Callable[[str], ServerProcess]
) -> None:
    """The page finds back by itself, says that the answer was cut, and offers Retry."""
    server = own_server("0")
    context, trouble = new_context()
    trouble.server = server.url
    trouble.expected.append(re.compile("ERR_|Failed to fetch|network"))
    page = context.new_page()
    page.goto(server.url)
    page.fill("#composer-text", "Tell me everything")
    page.press("#composer-text", "Enter")
    page.wait_for_selector(f"{RUNNING} h1")
    server.stop()
    expect(page.locator(".message--unreachable")).to_have_count(1)
    own_server(server.url.rsplit(":", 1)[1])
    expect(page.locator(".message__note--interrupted")).to_have_count(1)
    assert shown(page).startswith("Ananswerwitheverything")
    page.click(".message__retry")
    expect(page.locator(DONE)).to_have_count(1)
    assert shown(page) == expected(LONG_ANSWER)

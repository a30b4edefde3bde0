"""A real browser against a real server process, with a record of everything that went wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect, sync_playwright

from tests.e2e.server_process import ROOT, ServerProcess

CHROMIUM = "/usr/bin/chromium"
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
LIMIT_S = 400  # of one test with its fixtures; closing a browser has no limit of its own
# Playwright's scripts run whatever the page's policy says; pages cannot see or stop this one.
REPORT_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error("policy violation", event.violatedDirective, event.blockedURI));
"""

expect.set_options(timeout=20_000)


@pytest.fixture(autouse=True)
def _no_test_hangs() -> Iterator[None]:
    """Kill the browser under a test that does not come to an end: it fails, the run goes on."""

    def kill() -> None:
        for child in psutil.Process().children(recursive=True):
            if "chrom" in child.name():
                child.kill()

    timer = threading.Timer(LIMIT_S, kill)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium a module. Not longer: its event loop would be in the way of other tests."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    from app.setup_model import set_up_embedded_model

    return set_up_embedded_model(ROOT / "data", print)


@dataclass
class Trouble:
    """What a page must not do, as it happens."""

    server: str
    found: list[str] = field(default_factory=list)
    expected: list[re.Pattern[str]] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("console", lambda m: self._add(f"console {m.type}: {m.text}", m.type))
        page.on("pageerror", lambda error: self.found.append(f"page error: {error}"))
        page.on("request", self._check_host)
        page.on("crash", lambda _: self.found.append("the page crashed"))

    def _add(self, text: str, kind: str) -> None:
        if kind in ("error", "warning"):
            self.found.append(text)

    def _check_host(self, request: Request) -> None:
        own, asked = urlsplit(self.server), urlsplit(request.url)
        if asked[:2] != own[:2]:
            self.found.append(f"request to {request.url}")

    def unexpected(self) -> list[str]:
        return [
            text for text in self.found if not any(known.search(text) for known in self.expected)
        ]


@pytest.fixture
def new_context(
    browser: Browser, server: ServerProcess
) -> Iterator[Callable[..., tuple[BrowserContext, Trouble]]]:
    """Makes browsers with cookies of their own; at the end none may have had any trouble."""
    made: list[tuple[BrowserContext, Trouble]] = []

    def make(**options: object) -> tuple[BrowserContext, Trouble]:
        context = browser.new_context(base_url=server.url, **options)  # type: ignore[arg-type]
        context.set_default_timeout(20_000)
        context.add_init_script(REPORT_VIOLATIONS)
        trouble = Trouble(server.url)
        context.on("page", trouble.watch)
        made.append((context, trouble))
        return context, trouble

    yield make
    for context, _ in made:
        context.close()
    assert [text for _, trouble in made for text in trouble.unexpected()] == []


@pytest.fixture
def page(new_context: Callable[..., tuple[BrowserContext, Trouble]]) -> Page:
    """A page of a browser that was never here."""
    context, _ = new_context(viewport={"width": 1280, "height": 800})
    return context.new_page()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    """The web application with the scripted engine, and a data directory of its own."""
    home = tmp_path_factory.mktemp("scripted")
    script = Path(__file__).with_name("scripted_server.py")
    process = ServerProcess(
        [str(script), str(home / "data"), str(model_dir)], home / "log", wait_s=60
    )
    yield process
    process.stop()

"""A server with a public address: the first operator, an invitation, what signed-out pages do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import DONE, begin
from tests.e2e.scripted_server import REPEAT
from tests.e2e.server_process import ROOT, ServerProcess
from tests.e2e.test_browser_a11y import Axe

Contexts = Callable[..., tuple[BrowserContext, Any]]
PASSWORD = "correct horse battery"
REFUSALS = re.compile("status of 4")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("public")


@pytest.fixture(scope="module")
def server(home: Path, model_dir: Path) -> Iterator[ServerProcess]:
    """A server that people reach under a public address, over HTTPS as it believes."""
    (home / "data").mkdir()
    (home / "data" / "rejoinder.toml").write_text('public_url = "https://localhost"\n')
    script = Path(__file__).with_name("scripted_server.py")
    process = ServerProcess(
        [str(script), str(home / "data"), str(model_dir)], home / "log", wait_s=60
    )
    yield process
    process.stop()


def invitation(home: Path, *options: str) -> str:
    """The link that the command line makes."""
    command = [sys.executable, "-m", "app.cli", "users", "invite", *options]
    made = subprocess.run(
        [*command, "--data-dir", str(home / "data")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout.strip()


def join(page: Page, link: str, name: str) -> None:
    """Make an account by an invitation."""
    page.goto(link)
    page.fill("input[name=name]", name)
    page.fill("input[name=password]", PASSWORD)
    page.click("text=Make the account")
    expect(page.locator(".sidebar__name")).to_have_text(name)


def test_from_the_first_operator_to_a_member(
    new_context: Contexts, home: Path, server: ServerProcess
) -> None:
    context, trouble = new_context(viewport={"width": 1280, "height": 800})
    trouble.expected.append(REFUSALS)
    trouble.expected.append(re.compile("style-src|inline style"))  # axe measures with styles
    page = context.new_page()
    page.goto("/")
    expect(page).to_have_url(re.compile("/sign-in$"))
    expect(page.locator("main")).to_contain_text("rejoinder users invite --operator")
    axe = Axe(page)
    axe.look("sign in")

    link = invitation(home, "--operator")
    assert link.startswith("https://localhost/invitations/")
    path = link.removeprefix("https://localhost")
    page.goto(path)
    axe.look("invitation")
    join(page, path, "Olga")
    names = {one["name"]: one for one in context.cookies()}
    assert set(names) == {"__Host-rejoinder_login", "__Host-rejoinder_csrf"}
    assert all(one["secure"] for one in names.values())
    page.goto(path)
    expect(page.locator("h1")).to_have_text("Gone")

    page.goto("/people")
    page.click("text=Make a link")
    link = page.locator("#made-link").text_content() or ""
    axe.look("people")
    assert axe.faults == []

    # The member has no operator's pages; htmx's own requests carry the token of this server.
    member, member_trouble = new_context(viewport={"width": 380, "height": 740})
    member_trouble.expected.append(REFUSALS)
    theirs = member.new_page()
    join(theirs, link.removeprefix("https://localhost"), "Max")
    begin(theirs, f"{REPEAT}hello")
    expect(theirs.locator(DONE)).to_have_count(1)
    theirs.goto("/people")
    expect(theirs.locator("main")).to_contain_text("Only operators see this")

    # Disabled while a page is open: what is written stays, and nothing is asked again and again.
    theirs.go_back()
    theirs.wait_for_selector("#composer-text")
    page.goto("/people")
    page.click("[aria-label='Disable Max']")
    expect(page.locator(".account__badge--off")).to_have_count(1)
    theirs.fill("#composer-text", "words that took an hour")
    theirs.press("#composer-text", "Enter")
    expect(theirs.locator(".problem")).to_contain_text("You are not signed in any more")
    expect(theirs.locator("#composer-text")).to_have_value("words that took an hour")
    theirs.goto("/account")
    expect(theirs).to_have_url(re.compile(r"/sign-in\?next_path=%2Faccount$"))


def test_a_stream_ends_with_the_login_and_asks_no_more(
    new_context: Contexts, home: Path, server: ServerProcess
) -> None:
    context, trouble = new_context(viewport={"width": 1280, "height": 800})
    trouble.expected.append(REFUSALS)
    page = context.new_page()
    join(page, invitation(home).removeprefix("https://localhost"), "Eve")
    begin(page, "Hold: reading")
    page.wait_for_selector(".message--running")
    other = context.new_page()
    other.goto("/account")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    other.click("text=Sign out everywhere")
    expect(other).to_have_url(re.compile("/sign-in$"))
    page.reload()
    expect(page).to_have_url(re.compile("/sign-in"))
    streams = [url for url in asked if url.endswith(("/events", "/candidates"))]
    assert len(streams) <= 1

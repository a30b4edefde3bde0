"""Accounts in a real browser: claim, sign out, sign in elsewhere, logins, keys, without scripts."""

from __future__ import annotations

import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.pages import DONE, begin
from tests.e2e.scripted_server import REPEAT
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_browser_a11y import Axe

Contexts = Callable[..., tuple[BrowserContext, Any]]
PASSWORD = "correct horse battery"
CHATS = ".chat-list__link"
REFUSALS = re.compile("status of 4")


def chat(page: Page, text: str) -> None:
    begin(page, f"{REPEAT}{text}")
    expect(page.locator(DONE)).to_have_count(1)


def claim(page: Page) -> str:
    """Make the browser's guest an account with a name of its own."""
    name = f"Ada {secrets.token_hex(4)}"
    page.goto("/")
    if page.locator(".topbar__toggle").is_visible():
        page.click(".topbar__toggle")
    page.click(".sidebar__account")
    page.fill("input[name=name]", name)
    page.fill("input[name=password]", PASSWORD)
    page.click("text=Make an account")
    expect(page.locator("h1")).to_have_text(name)
    return name


def sign_in(page: Page, name: str) -> None:
    page.fill("input[name=name]", name)
    page.fill("input[name=password]", PASSWORD)
    page.click("main button[type=submit]")
    expect(page.locator(".sidebar__name")).to_have_text(name)


def models(server: ServerProcess, key: str) -> int:
    """The status of a call of the API."""
    request = urllib.request.Request(
        f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            assert json.load(response)["data"]
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_an_account_goes_where_its_owner_goes(new_context: Contexts) -> None:
    context, trouble = new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    chat(page, "first chat")
    name = claim(page)
    expect(page.locator(CHATS)).to_have_text(["Repeat: first chat"])

    second, other_trouble = new_context(viewport={"width": 380, "height": 740})
    other_trouble.expected.append(REFUSALS)
    elsewhere = second.new_page()
    chat(elsewhere, "guest chat")
    elsewhere.goto("/sign-in")
    elsewhere.fill("input[name=name]", name)
    elsewhere.fill("input[name=password]", "not the password")
    elsewhere.click("main button[type=submit]")
    expect(elsewhere.locator(".problem")).to_contain_text("do not fit together")
    expect(elsewhere.locator("input[name=take_along]")).to_be_checked()
    sign_in(elsewhere, name)
    expect(elsewhere.locator(CHATS)).to_have_count(2)
    assert elsewhere.evaluate("document.documentElement.scrollWidth") <= 380

    # A login that is ended elsewhere is worth nothing at the next look.
    trouble.expected.append(REFUSALS)
    page.goto("/account")
    expect(page.locator(".account__item")).to_have_count(2)
    page.click("text=Sign out >> nth=1")
    expect(page.locator(".account__item")).to_have_count(1)
    elsewhere.goto("/")
    expect(elsewhere.locator(CHATS)).to_have_count(0)
    expect(elsewhere.locator(".sidebar__name")).to_have_text("Guest")

    page.goto("/account")
    page.click(".account__actions button")
    expect(page.locator(".sidebar__name")).to_have_text("Guest")
    expect(page.locator(CHATS)).to_have_count(0)


def test_an_open_page_goes_on_after_a_sign_in_in_another_tab(new_context: Contexts) -> None:
    context, _ = new_context()
    page = context.new_page()
    chat(page, "a guest's")
    tab = context.new_page()
    name = claim(tab)
    page.fill("#composer-text", f"{REPEAT}said by {name}")
    page.press("#composer-text", "Enter")
    expect(page.locator(DONE)).to_have_count(2)


def test_a_key_is_made_used_and_revoked(page: Page, server: ServerProcess) -> None:
    page.goto("/account")
    page.fill("#key-name", "a notebook")
    page.click("text=Make a key")
    key = page.locator("#new-key").text_content() or ""
    assert models(server, key) == 200
    page.goto("/account")
    expect(page.locator("#new-key")).to_have_count(0)
    page.click("text=Revoke")
    expect(page.locator(".account__name")).to_have_count(0)
    assert models(server, key) == 401


def test_all_of_it_works_without_scripts(new_context: Contexts) -> None:
    context, _ = new_context(java_script_enabled=False, viewport={"width": 380, "height": 740})
    page = context.new_page()
    page.goto("/account")
    name = f"Bob {secrets.token_hex(4)}"
    page.fill("input[name=name]", name)
    page.fill("input[name=password]", PASSWORD)
    page.click("text=Make an account")
    expect(page.locator("h1")).to_have_text(name)
    page.click(".account__actions button")
    page.goto("/sign-in?next_path=/account")
    sign_in(page, name)
    page.fill("form[action='/account/password'] input[name=old_password]", PASSWORD)
    page.fill("form[action='/account/password'] input[name=password]", "another long one")
    page.click("text=Change it")
    expect(page.locator("[role=status].account__note")).to_have_text("Your password was changed.")
    page.click("summary:has-text('Delete the account')")
    page.fill("form[action='/account/delete'] input[name=old_password]", "another long one")
    page.click("text=Delete the account and all chats")
    expect(page).to_have_url(re.compile(r"/$"))
    expect(page.locator(".sidebar__name")).to_have_text("Guest")


def test_the_pages_are_clean_and_fit(new_context: Contexts) -> None:
    for scheme in ("light", "dark"):
        context, trouble = new_context(color_scheme=scheme, viewport={"width": 380, "height": 740})
        trouble.expected.append(re.compile("style-src|inline style"))  # axe measures with styles
        trouble.expected.append(REFUSALS)
        page = context.new_page()
        axe = Axe(page)

        def look(state: str, page: Page = page, axe: Axe = axe) -> None:
            axe.look(state)
            assert page.evaluate("document.documentElement.scrollWidth") <= 380, state

        chat(page, "words")
        page.goto("/account")
        look("guest")
        page.goto("/sign-in")
        look("sign in")
        page.fill("input[name=name]", "nobody")
        page.fill("input[name=password]", "nothing at all")
        page.click("main button[type=submit]")
        look("refused")
        claim(page)
        page.fill("#key-name", "W" * 60)
        page.click("text=Make a key")
        page.click("summary:has-text('Delete the account')")
        look("account")
        assert axe.faults == []

"""What tests of accounts do again and again."""

from __future__ import annotations

import re
from datetime import timedelta

import httpx
import pytest
from argon2 import PasswordHasher

from app.accounts.service import invite
from tests.app.web_client import Browser, Server

PASSWORD = "correct horse battery"


@pytest.fixture(autouse=True)
def quick_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argon2 at a cost that fits a test."""
    quick = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
    monkeypatch.setattr("app.accounts.passwords.PasswordHasher", lambda: quick)


async def claim(browser: Browser, name: str, password: str = PASSWORD) -> None:
    """Make the browser's guest an account."""
    await browser.get("/account")
    made = await browser.post("/account/claim", {"name": name, "password": password})
    assert made.status_code == 303, made.text
    await browser.get("/account")


async def sign_in(
    browser: Browser, name: str, password: str = PASSWORD, **fields: str
) -> httpx.Response:
    await browser.get("/sign-in")
    return await browser.post("/sign-in", {"name": name, "password": password, **fields})


async def invited(
    server: Server, browser: Browser, name: str, *, operator: bool = False
) -> httpx.Response:
    """Make an account by an invitation, as a person would."""
    repository = server.app.state.repository
    made = await invite(repository, for_operator=operator, lasts=timedelta(days=1))
    await browser.get(made.path)
    response = await browser.post(made.path, {"name": name, "password": PASSWORD})
    assert response.status_code == 303, response.text
    await browser.get("/account")
    return response


def chats_of(page: str) -> set[str]:
    """The chats that a page's list shows."""
    return set(re.findall(r'class="chat-list__link" dir="auto" href="/chats/([0-9a-f]{32})"', page))


def cookie(browser: Browser, name: str = "rejoinder_login") -> str | None:
    return browser.http.cookies.get(name)

"""The parts of accounts that need no server: names, passwords, tries, addresses, proxies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from argon2 import PasswordHasher

from app.accounts.names import local_path, name_key, name_of
from app.accounts.passwords import WAITING, Passwords, clean_password
from app.accounts.throttle import Throttle, network_of
from app.exposure import PublicAddress, TrustedProxies, is_loopback, needs_accounts
from app.faults import InvalidField, TooManyTries
from app.security.agent import agent_in_words
from app.security.entrance import Entrance
from app.security.hosts import AllowedHosts

QUICK = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)


@pytest.mark.parametrize(
    ("text", "shown", "key"),
    [
        ("Ada", "Ada", "ada"),
        ("  Ada   Lovelace ", "Ada Lovelace", "ada lovelace"),
        ("\N{FULLWIDTH LATIN CAPITAL LETTER A}da", "Ada", "ada"),
        ("Stra\N{LATIN SMALL LETTER SHARP S}e", "Stra\N{LATIN SMALL LETTER SHARP S}e", "strasse"),
        ("e\N{COMBINING ACUTE ACCENT}", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\xe9"),
    ],
)
def test_names_are_compared_as_people_read_them(text: str, shown: str, key: str) -> None:
    name = name_of(text)
    assert (name.shown, name.key) == (shown, key)
    assert name_key(key) == key


@pytest.mark.parametrize(
    "text",
    ["", "   ", "a" * 41, "a\x00b", "a\N{ZERO WIDTH SPACE}b", "a\N{RIGHT-TO-LEFT OVERRIDE}b"],
)
def test_names_that_nobody_could_type_again_are_refused(text: str) -> None:
    with pytest.raises(InvalidField):
        name_of(text)


@pytest.mark.parametrize(("length", "taken"), [(7, False), (8, True), (1024, True), (1025, False)])
def test_passwords_have_a_length_and_no_other_rule(length: int, taken: bool) -> None:
    if taken:
        assert clean_password(" " * length) == " " * length
    else:
        with pytest.raises(InvalidField, match=f"{length:,} characters; 8 to 1,024"):
            clean_password("x" * length)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/chats/1?a=b#c", "/chats/1?a=b#c"),
        ("", "/"),
        ("chats", "/"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("\\\\evil.example", "/"),
        ("https://evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("/\t/evil.example", "/"),
        ("/\n/evil.example", "/"),
        (" //evil.example", "/"),
        ("/" + "a" * 500, "/"),
        ("/\N{FULLWIDTH SOLIDUS}evil.example", "/"),
    ],
)
def test_a_form_leads_to_a_path_of_this_server(text: str, path: str) -> None:
    assert local_path(text) == path


@pytest.mark.anyio
async def test_a_password_fits_its_own_hash_alone() -> None:
    passwords = Passwords(QUICK)
    stored = await passwords.hash("e\N{COMBINING ACUTE ACCENT} is long enough")
    assert "$argon2id$" in stored
    assert not await passwords.matches(stored, "another")
    assert not await passwords.matches(None, "of nobody")
    assert not await passwords.matches(stored, "x" * 100_000)
    decomposed = clean_password("e\N{COMBINING ACUTE ACCENT} is long enough")
    stored = await passwords.hash(decomposed)
    assert await passwords.matches(stored, "\N{LATIN SMALL LETTER E WITH ACUTE} is long enough")
    assert not passwords.is_outdated(stored)
    assert Passwords(PasswordHasher()).is_outdated(stored)
    passwords.close()


@pytest.mark.anyio
async def test_an_unknown_name_takes_the_work_of_a_known_one() -> None:
    class Counting(PasswordHasher):
        verified = 0

        def verify(self, *args: Any, **options: Any) -> Literal[True]:
            Counting.verified += 1
            return super().verify(*args, **options)

    passwords = Passwords(Counting(time_cost=1, memory_cost=64, parallelism=1))
    stored = await passwords.hash("of somebody")
    for one in (stored, None):
        before = Counting.verified
        assert not await passwords.matches(one, "a guess")
        assert Counting.verified == before + 1
    passwords.close()


@pytest.mark.anyio
async def test_checks_that_wait_are_few() -> None:
    passwords = Passwords(QUICK)
    tasks = [asyncio.create_task(passwords.hash("a password")) for _ in range(WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyTries):
        await passwords.hash("one more")
    await asyncio.gather(*tasks)
    assert await passwords.hash("again")
    passwords.close()


def test_tries_come_back_one_by_one_and_memory_is_bounded() -> None:
    now = 0.0
    throttle = Throttle(3, 30.0, max_keys=5, clock=lambda: now)
    for _ in range(3):
        throttle.take("ada")
    with pytest.raises(TooManyTries) as caught:
        throttle.take("ada")
    assert caught.value.retry_after_s == 10
    throttle.take("bob")
    now = 10.5
    throttle.take("ada")
    with pytest.raises(TooManyTries):
        throttle.take("ada")
    throttle.forgive("ada")
    throttle.take("ada")
    for number in range(50):
        throttle.take(str(number))
    assert len(throttle) == 5


def test_neighbours_in_a_network_of_ipv6_share_their_tries() -> None:
    assert network_of("2001:db8:1:2::1") == network_of("2001:db8:1:2:ffff::9")
    assert network_of("2001:db8:1:2::1") != network_of("2001:db8:1:3::1")
    assert network_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert network_of("192.0.2.1") != network_of("192.0.2.2")


@pytest.mark.parametrize(
    ("host", "public", "needed"),
    [
        ("127.0.0.1", "", False),
        ("::1", "", False),
        ("localhost", "", False),
        ("127.0.0.1", "https://chat.example.org", True),
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("192.0.2.7", "", True),
        ("no such host.invalid", "", True),
    ],
)
def test_accounts_are_needed_beyond_this_machine(host: str, public: str, needed: bool) -> None:
    assert needs_accounts(host, public) is needed
    if not public:
        assert is_loopback(host) is not needed


@pytest.mark.parametrize(
    ("url", "origin", "host"),
    [
        ("https://Chat.Example.org/", "https://chat.example.org", "chat.example.org"),
        ("https://chat.example.org:443", "https://chat.example.org", "chat.example.org"),
        ("http://chat.lan:8080", "http://chat.lan:8080", "chat.lan"),
        ("https://[2001:db8::1]:8443", "https://[2001:db8::1]:8443", "[2001:db8::1]"),
    ],
)
def test_a_public_address_is_an_origin(url: str, origin: str, host: str) -> None:
    address = PublicAddress.parse(url)
    assert (address.origin, address.host) == (origin, host)
    assert address.https is url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        "chat.lan",
        "ftp://a.b",
        "https://a.b/c",
        "https://u@a.b",
        "https://a.b:0",
        "https://a b",
        "/",
    ],
)
def test_what_is_no_public_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        PublicAddress.parse(url)


def test_the_browser_is_the_nearest_address_that_is_no_proxy() -> None:
    proxies = TrustedProxies(("127.0.0.1", "10.0.0.0/8"))
    assert proxies.client("127.0.0.1", ["203.0.113.9"]) == "203.0.113.9"
    assert proxies.client("127.0.0.1", ["1.2.3.4, 203.0.113.9, 10.1.1.1"]) == "203.0.113.9"
    assert proxies.client("203.0.113.5", ["1.2.3.4"]) == "203.0.113.5"
    assert proxies.client("127.0.0.1", ["garbage"]) == "127.0.0.1"
    assert proxies.client("127.0.0.1", []) == "127.0.0.1"
    assert proxies.trusts("::ffff:127.0.0.1")


FORWARDED = [
    (b"x-forwarded-for", b"203.0.113.9"),
    (b"x-forwarded-proto", b"https"),
    (b"x-forwarded-host", b"evil.example"),
    (b"forwarded", b"for=203.0.113.9"),
    (b"x-real-ip", b"203.0.113.9"),
    (b"X-Forwarded-Anything", b"1"),
]


async def _through(
    proxies: TrustedProxies | None, peer: str, headers: list[tuple[bytes, bytes]]
) -> tuple[int, dict[str, Any]]:
    """Status, and the scope that came through."""
    seen: dict[str, Any] = {}
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    receive: Callable[..., Any] = send
    entrance = Entrance(app, AllowedHosts(["chat.example.org"]), proxies)
    scope: Any = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "scheme": "http",
        "client": (peer, 5),
        "headers": [(b"host", b"chat.example.org"), *headers],
    }
    await entrance(scope, receive, send)
    return sent[0]["status"], seen


@pytest.mark.anyio
@pytest.mark.parametrize("header", FORWARDED, ids=[name.decode() for name, _ in FORWARDED])
async def test_forwarded_headers_are_refused_without_a_public_address(
    header: tuple[bytes, bytes],
) -> None:
    status, seen = await _through(None, "127.0.0.1", [header])
    assert (status, seen) == (400, {})


@pytest.mark.anyio
async def test_trusted_proxies_alone_say_who_is_behind_them() -> None:
    proxies = TrustedProxies(("127.0.0.1",))
    status, seen = await _through(proxies, "127.0.0.1", FORWARDED)
    assert (status, seen["client"][0], seen["scheme"]) == (204, "203.0.113.9", "https")
    assert seen["headers"] == [(b"host", b"chat.example.org")]
    status, seen = await _through(proxies, "203.0.113.5", FORWARDED)
    assert (status, seen["client"][0], seen["scheme"]) == (204, "203.0.113.5", "http")
    assert seen["headers"] == [(b"host", b"chat.example.org")]


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (
            "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0",
            "Firefox on Linux",
        ),
        (
            "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) "
            "Chrome/140.0 Safari/537.36 Edg/140.0",
            "Edge on Windows",
        ),
        (
            "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15 "
            "(KHTML, like Gecko) Version/18.0 Mobile/15E148 Safari/604.1",
            "Safari on iPhone",
        ),
        ("curl/8.5.0", "curl"),
        ("", ""),
        ("\x00<script>" * 1000, ""),
    ],
)
def test_a_browser_is_told_in_words(agent: str, words: str) -> None:
    assert agent_in_words(agent) == words

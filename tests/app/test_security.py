"""What stands before the routes: headers, Host, Origin, CSRF token, login cookie."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pytest
from litestar import Litestar, Request, get, post
from litestar.enums import RequestEncodingType
from litestar.params import Body, JSONBody
from litestar.response import Stream
from litestar.static_files import create_static_files_router
from litestar.testing import TestClient

from app.security import SecurityPlugin, csrf_token, current_user, ensure_user
from app.security.csrf import CSRF_COOKIE, CsrfSigner, load_csrf_secret
from app.security.hosts import AllowedHosts
from app.security.login import LOGIN_COOKIE
from sessions.records import User

BASE = "http://127.0.0.1:8000"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; font-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


class Accounts:
    """The repository's methods that security uses, in memory."""

    def __init__(self) -> None:
        self.logins: dict[str, User] = {}
        self.settings: dict[str, str] = {}

    async def create_user(self, token_hash: str, agent: str = "") -> User:
        user = User(id=f"{len(self.logins):032x}", created_at=datetime.now(UTC))
        self.logins[token_hash] = user
        return user

    async def user_by_token(self, token_hash: str) -> User | None:
        return self.logins.get(token_hash)

    async def ensure_setting(self, key: str, value: str) -> str:
        return self.settings.setdefault(key, value)


@get("/page")
async def page(request: Request[Any, Any, Any]) -> str:
    user = await current_user(request)
    return f"{csrf_token(request)} {user.id if user else 'nobody'}"


@get("/events")
async def events() -> Stream:
    async def parts() -> AsyncGenerator[str, None]:
        yield "data: x\n\n"

    return Stream(parts(), media_type="text/event-stream")


@get("/broken")
async def broken() -> str:
    raise RuntimeError("a fault of ours")


@post("/act")
async def act(
    request: Request[Any, Any, Any],
    data: Annotated[dict[str, str], Body(media_type=RequestEncodingType.URL_ENCODED)],
) -> dict[str, str]:
    user = await ensure_user(request)
    return {"user": user.id, "text": data.get("text", ""), "token": csrf_token(request)}


@post("/v1/act")
async def api_act(data: JSONBody[dict[str, str]]) -> dict[str, str]:
    return data


def make_app(accounts: Accounts, static: Path, **plugin: Any) -> Litestar:
    @asynccontextmanager
    async def own_lifespan(app: Litestar) -> AsyncGenerator[None, None]:
        app.state.repository = accounts
        yield

    return Litestar(
        route_handlers=[
            page, events, broken, act, api_act,
            create_static_files_router(path="/static", directories=[static]),
        ],
        lifespan=[own_lifespan],
        plugins=[SecurityPlugin(**plugin)],
        openapi_config=None,
        request_max_body_size=1000,
    )  # fmt: skip


@pytest.fixture
def accounts() -> Accounts:
    return Accounts()


@pytest.fixture
def client(accounts: Accounts, tmp_path: Path) -> Iterator[TestClient[Litestar]]:
    (tmp_path / "app.css").write_text("body {}")
    with TestClient(
        make_app(accounts, tmp_path), base_url=BASE, raise_server_exceptions=False
    ) as client:
        yield client


def open_page(client: TestClient[Litestar]) -> str:
    return client.get("/page").text.split()[0]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/page", 200),
        ("GET", "/events", 200),
        ("GET", "/static/app.css", 200),
        ("GET", "/static/none.css", 404),
        ("GET", "/none", 404),
        ("GET", "/broken", 500),
        ("POST", "/act", 403),
        ("POST", "/page", 405),
        ("POST", "/v1/act", 400),
    ],
)
def test_every_response_has_the_headers(
    client: TestClient[Litestar], method: str, path: str, status: int
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
    assert len(response.headers.get_list("content-security-policy")) == 1
    private = not path.startswith("/static/")
    assert (response.headers["cache-control"] == "no-store") is private


def test_a_refused_host_gets_the_headers_too(client: TestClient[Litestar]) -> None:
    response = client.get("/page", headers={"host": "evil.example"})
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("text/plain")
    assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8000"]
)
def test_own_hosts_pass_whatever_the_port(client: TestClient[Litestar], host: str) -> None:
    assert client.get("/page", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "evil@localhost",
     "localhost:8000@evil.example", "", "localhost:port", "[::1", "::1", "127.0.0.1:8000:9",
     "localhost,evil.example", "localhost/", "localhost\\evil"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/page"),
        ("GET", "/static/app.css"),
        ("POST", "/v1/act"),
        ("GET", "/none"),
        ("DELETE", "/page"),
        ("OPTIONS", "/page"),
    ],
)
def test_other_hosts_are_refused(
    client: TestClient[Litestar], host: str, method: str, path: str
) -> None:
    response = client.request(method, path, headers={"host": host})
    assert response.status_code == 400
    assert "does not answer to that host name" in response.text


def test_two_hosts_are_refused() -> None:
    assert not AllowedHosts().allows(["localhost", "localhost"])
    assert not AllowedHosts().allows([])


def test_hosts_of_the_settings() -> None:
    hosts = AllowedHosts(["chat.example.org", "::1"])
    assert hosts.allows(["Chat.Example.org:443"])
    assert hosts.allows(["[::1]:80"])
    assert not hosts.allows(["localhost"])
    with pytest.raises(ValueError, match="without port"):
        AllowedHosts(["localhost:8000"])


def test_a_form_with_its_token_passes(client: TestClient[Litestar]) -> None:
    token = open_page(client)
    response = client.post("/act", data={"_csrf_token": token, "text": "hi"})
    assert response.status_code == 201
    assert response.json()["text"] == "hi"


def test_a_request_with_the_header_passes(client: TestClient[Litestar]) -> None:
    token = open_page(client)
    response = client.post("/act", data={"text": "hi"}, headers={"x-csrftoken": token})
    assert response.status_code == 201


def test_multipart_forms_are_read_too(client: TestClient[Litestar]) -> None:
    token = open_page(client)
    fields = {"_csrf_token": (None, token), "text": (None, "hi")}
    assert client.post("/act", files=fields).status_code == 201
    assert client.post("/act", files={"text": (None, "hi")}).status_code == 403


@pytest.mark.parametrize("form", [{}, {"_csrf_token": ""}, {"_csrf_token": "a" * 97}])
def test_a_form_without_a_good_token_is_refused(
    client: TestClient[Litestar], accounts: Accounts, form: dict[str, str]
) -> None:
    open_page(client)
    assert client.post("/act", data=form).status_code == 403
    assert accounts.logins == {}


def test_a_token_without_the_cookie_is_refused(client: TestClient[Litestar]) -> None:
    token = open_page(client)
    client.cookies.clear()
    assert client.post("/act", data={"_csrf_token": token}).status_code == 403


def test_a_token_of_another_secret_is_refused(client: TestClient[Litestar]) -> None:
    forged = CsrfSigner(b"another secret", secure_cookie=False).make(b"")
    client.cookies.set(CSRF_COOKIE, forged)
    assert client.post("/act", data={"_csrf_token": forged}).status_code == 403


def test_a_token_that_is_not_ascii_is_refused(client: TestClient[Litestar]) -> None:
    open_page(client)
    assert client.post("/act", data={"_csrf_token": "\u00e9.\u00e9"}).status_code == 403


@pytest.mark.parametrize(
    "foreign", ["x", "a.b", '"quoted"', "0" * 97], ids=["short", "parts", "quoted", "long"]
)
def test_a_foreign_cookie_is_replaced(client: TestClient[Litestar], foreign: str) -> None:
    client.cookies.set(CSRF_COOKIE, foreign, domain="127.0.0.1", path="/")
    token = open_page(client)
    assert token != foreign
    assert client.post("/act", data={"_csrf_token": token}).status_code == 201


def test_a_neighbours_cookie_of_the_same_name_locks_nobody_out(
    client: TestClient[Litestar],
) -> None:
    token = open_page(client)
    cookies = f"{CSRF_COOKIE}=neighbour; other=1; {CSRF_COOKIE}={token}"
    response = client.post("/act", data={"_csrf_token": token}, headers={"cookie": cookies})
    assert response.status_code == 201


def test_a_valid_cookie_is_kept(client: TestClient[Litestar]) -> None:
    token = open_page(client)
    again = client.get("/page")
    assert again.text.split()[0] == token
    assert "set-cookie" not in again.headers


def test_the_secret_survives_a_restart(accounts: Accounts, tmp_path: Path) -> None:
    with TestClient(make_app(accounts, tmp_path), base_url=BASE) as first:
        token = open_page(first)
    with TestClient(make_app(accounts, tmp_path), base_url=BASE) as second:
        second.cookies.set(CSRF_COOKIE, token)
        assert second.post("/act", data={"_csrf_token": token}).status_code == 201


@pytest.mark.anyio
async def test_the_secret_is_long_and_made_once() -> None:
    accounts = Accounts()
    secret = await load_csrf_secret(accounts)
    assert len(secret) == 32
    assert await load_csrf_secret(accounts) == secret


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:8001"},
        {"origin": "http://127.0.0.1"},
        {"origin": "http://127.0.0.1:8000.evil.example"},
        {"origin": "ftp://127.0.0.1:8000"},
        {"origin": "file://"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "null", "sec-fetch-site": "cross-site"},
    ],
)
def test_another_origin_is_refused_even_with_the_token(
    client: TestClient[Litestar], headers: dict[str, str]
) -> None:
    token = open_page(client)
    response = client.post("/act", data={"_csrf_token": token}, headers=headers)
    assert response.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "https://127.0.0.1:8000"},  # behind a proxy that ends TLS
        {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"},
        {"origin": "null", "sec-fetch-site": "same-origin"},  # a form under no-referrer
        {"origin": "null"},  # the same over plain HTTP on another machine
    ],
)
def test_our_own_origin_passes(client: TestClient[Litestar], headers: dict[str, str]) -> None:
    token = open_page(client)
    response = client.post("/act", data={"_csrf_token": token}, headers=headers)
    assert response.status_code == 201


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/msgpack"])
def test_other_bodies_are_no_forms(client: TestClient[Litestar], kind: str) -> None:
    token = open_page(client)
    headers = {"x-csrftoken": token, "content-type": kind}
    response = client.post("/act", content='{"text": "hi"}', headers=headers)
    assert response.status_code == 415


def test_a_body_of_no_type_is_no_form(client: TestClient[Litestar]) -> None:
    headers = {"x-csrftoken": open_page(client)}
    assert client.post("/act", content=b"text=hi", headers=headers).status_code == 415


def test_the_size_limit_holds_for_the_token_check(client: TestClient[Litestar]) -> None:
    token = open_page(client)
    response = client.post("/act", data={"text": "x" * 2000, "_csrf_token": token})
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"garbage"),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\nx"),
        ("application/x-www-form-urlencoded", b"_csrf_token=%ff%fe&%00=%zz"),
        ("application/x-www-form-urlencoded; charset=utf-16", b"\xff\xfe=\x00"),
        ("APPLICATION/X-WWW-FORM-URLENCODED", b"a=b"),
        ("application/x-www-form-urlencoded, text/plain", b"a=b"),
        ("", b"a=b"),
    ],
)
def test_malformed_forms_are_refused_calmly(
    client: TestClient[Litestar], kind: str, body: bytes
) -> None:
    open_page(client)
    response = client.post("/act", content=body, headers={"content-type": kind})
    assert response.status_code in (400, 403, 415)


def test_the_api_needs_no_token_and_sets_no_cookie(client: TestClient[Litestar]) -> None:
    response = client.post("/v1/act", json={"a": "b"})
    assert response.json() == {"a": "b"}
    assert "set-cookie" not in response.headers
    foreign = client.post("/v1/act", json={"a": "b"}, headers={"origin": "http://x.example"})
    assert foreign.status_code == 403


@pytest.mark.parametrize("path", ["/v1x/act", "/V1/act", "/v11"])
def test_only_the_api_itself_is_exempt(client: TestClient[Litestar], path: str) -> None:
    assert client.post(path, json={}).status_code in (403, 404, 415)


def test_reading_makes_no_user(client: TestClient[Litestar], accounts: Accounts) -> None:
    assert client.get("/page").text.split()[1] == "nobody"
    assert accounts.logins == {}
    assert LOGIN_COOKIE not in client.cookies


def test_the_first_post_makes_a_user_who_comes_back(
    client: TestClient[Litestar], accounts: Accounts
) -> None:
    token = open_page(client)
    made = client.post("/act", data={"_csrf_token": token})
    cookies = {c.split("=")[0]: c for c in made.headers.get_list("set-cookie")}
    login = cookies[LOGIN_COOKIE]
    for part in ("HttpOnly", "SameSite=Lax", "Path=/", "Max-Age="):
        assert part in login
    assert "Secure" not in login
    assert "HttpOnly" not in cookies[CSRF_COOKIE]
    assert client.get("/page").text.split()[1] == made.json()["user"]
    secret = client.cookies[LOGIN_COOKIE]
    assert list(accounts.logins) == [hashlib.sha256(secret.encode()).hexdigest()]
    assert len(accounts.logins) == 1


def test_the_token_is_bound_to_the_login(client: TestClient[Litestar]) -> None:
    before = open_page(client)
    made = client.post("/act", data={"_csrf_token": before})
    after = client.cookies[CSRF_COOKIE]
    assert made.json()["token"] == after != before
    assert open_page(client) == after
    assert client.post("/act", data={"_csrf_token": after}).status_code == 201
    client.cookies.set(CSRF_COOKIE, before, domain="127.0.0.1", path="/")
    assert client.post("/act", data={"_csrf_token": before}).status_code == 403


def test_an_unknown_login_is_nobody_and_gets_a_new_one(
    client: TestClient[Litestar], accounts: Accounts
) -> None:
    client.cookies.set(LOGIN_COOKIE, "A" * 43, domain="127.0.0.1", path="/")
    page = client.get("/page").text.split()
    assert page[1] == "nobody"
    assert client.post("/act", data={"_csrf_token": page[0]}).status_code == 201
    assert client.cookies[LOGIN_COOKIE] != "A" * 43
    assert len(accounts.logins) == 1


@pytest.mark.parametrize(
    "login",
    ["", "short", "A" * 44, "A" * 42 + "/", "' OR 1=1 --"],
    ids=["empty", "short", "long", "slash", "quotes"],
)
def test_a_malformed_login_is_not_looked_up(
    client: TestClient[Litestar], accounts: Accounts, login: str
) -> None:
    accounts.logins[hashlib.sha256(login.encode()).hexdigest()] = User(
        id="f" * 32, created_at=datetime.now(UTC)
    )
    response = client.get("/page", headers={"cookie": f"{LOGIN_COOKIE}={login}"})
    assert response.text.split()[1] == "nobody"


def test_cookies_are_secure_behind_https(accounts: Accounts, tmp_path: Path) -> None:
    app = make_app(accounts, tmp_path, public_url="https://chat.example.org")
    with TestClient(app, base_url="https://chat.example.org") as client:
        token = open_page(client)
        made = client.post("/act", data={"_csrf_token": token})
        assert made.status_code == 201
        cookies = made.headers.get_list("set-cookie")
        assert len(cookies) == 2
        assert all("Secure" in value and value.startswith("__Host-") for value in cookies)
        assert client.get("/page").text.split()[1] != "nobody"


def test_two_browsers_are_two_users(accounts: Accounts, tmp_path: Path) -> None:
    users = set()
    for _ in range(2):
        with TestClient(make_app(accounts, tmp_path), base_url=BASE) as client:
            token = open_page(client)
            users.add(client.post("/act", data={"_csrf_token": token}).json()["user"])
    assert len(users) == 2

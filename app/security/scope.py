"""Reading and adding raw headers, and what one request carries between the parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any, cast

from litestar.types import Message, Scope

_STATE_KEY = "rejoinder_security"


@dataclass
class RequestSecurity:
    """Of one request: cookies to set on its response, and what was looked up already."""

    cookies: dict[str, str] = field(default_factory=dict)  # name -> whole Set-Cookie value
    csrf_token: str | None = None
    login_token: str | None = None  # issued by this request; "" when it took the login away
    login_hash: str | None = None  # of the login that named the user
    user: Any = None
    user_known: bool = False


def request_security(scope: Scope) -> RequestSecurity:
    """Return the record of this request, made at first use."""
    state = scope.setdefault("state", {})
    found = state.get(_STATE_KEY)
    if found is None:
        found = state[_STATE_KEY] = RequestSecurity()
    return cast(RequestSecurity, found)


def header_values(scope: Scope, name: bytes) -> list[str]:
    """Return every value of a header; `name` in lower case."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def cookie_values(scope: Scope, name: str) -> list[str]:
    """Return every cookie of that name: a neighbour on another port or path may add its own."""
    found = []
    for header in header_values(scope, b"cookie"):
        for pair in header.split(";"):
            key, _, value = pair.strip().partition("=")
            if key == name:
                found.append(value.strip('"'))
    return found


def own_cookie(scope: Scope, name: str) -> str:
    """Return the name that one of our cookies has on this server.

    Over HTTPS browsers keep a cookie `__Host-...` from being set by a neighbouring host or page.
    """
    secure: bool = scope["litestar_app"].state.secure_cookies
    return f"__Host-{name}" if secure else name


def set_cookie_value(
    name: str, value: str, *, secure: bool, http_only: bool, max_age_s: int
) -> str:
    """Return a Set-Cookie value for the whole site, SameSite=Lax."""
    cookie: SimpleCookie = SimpleCookie()
    cookie[name] = value
    morsel = cookie[name]
    morsel["path"] = "/"
    morsel["max-age"] = str(max_age_s)
    morsel["samesite"] = "Lax"
    morsel["httponly"] = http_only
    morsel["secure"] = secure
    return morsel.OutputString()


def add_header(message: Message, name: bytes, value: str, *, replace: bool = True) -> None:
    """Set a header of a response start; `replace=False` keeps one that is there."""
    headers = list(cast(Any, message).get("headers", []))
    if not replace and any(key.lower() == name for key, _ in headers):
        return
    kept = [(key, old) for key, old in headers if key.lower() != name]
    cast(Any, message)["headers"] = [*kept, (name, value.encode("latin-1"))]


def header_of(message: Message, name: bytes) -> str:
    """Return the first value of a header of a response start, "" for none; `name` in lower case."""
    headers = cast(Any, message).get("headers", [])
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), "")


def append_cookie(message: Message, value: str) -> None:
    """Add one Set-Cookie header to a response start."""
    headers = list(cast(Any, message).get("headers", []))
    cast(Any, message)["headers"] = [*headers, (b"set-cookie", value.encode("latin-1"))]

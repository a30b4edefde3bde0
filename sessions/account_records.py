"""What the repository hands out about accounts: plain frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sessions.records import User


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLogin:
    """A login to be made: the hash of its token, and the browser in words."""

    token_hash: str
    agent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name as it is shown, and as names are compared."""

    shown: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A user who can sign in, and the hash of the password."""

    user: User
    password_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginRecord:
    """A browser that is signed in."""

    id: str
    token_hash: str
    agent: str
    created_at: datetime
    last_seen_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLink:
    """A link that works once: an invitation, or for `user_id` a new password."""

    id: str
    user_id: str | None
    for_operator: bool
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user with a name, as the operator sees it."""

    user: User
    num_chats: int
    last_seen_at: datetime | None  # None: never signed in, or signed out everywhere

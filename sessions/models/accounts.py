"""Who uses the service: users, their logins in browsers, their keys of the API."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, String, false
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, identifier, reference


class User(Base):
    """A guest until it has a name; `name_key` is the name as names are compared.

    A deleted account stays as a row without name and password, disabled.
    """

    __tablename__ = "user"
    id: Mapped[str] = identifier()
    created_at: Mapped[datetime]
    name: Mapped[str | None] = mapped_column(String(64))
    name_key: Mapped[str | None] = mapped_column(String(256), unique=True, index=True)
    password_hash: Mapped[str | None] = mapped_column(String(256))
    is_operator: Mapped[bool] = mapped_column(server_default=false())
    disabled_at: Mapped[datetime | None]


class Login(Base):
    """A browser that is signed in. `guest_id` is the guest whom it gets back at its end."""

    __tablename__ = "login"
    id: Mapped[str] = identifier()
    user_id: Mapped[str] = reference("user.id")
    token_hash: Mapped[str] = mapped_column(String(128), unique=True)
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    agent: Mapped[str] = mapped_column(String(64), server_default="")  # the browser, in words
    guest_id: Mapped[str | None] = mapped_column(String(32), ForeignKey("user.id"), index=True)


class AccountLink(Base):
    """A link that works once: an invitation, or for the user it names a new password."""

    __tablename__ = "account_link"
    id: Mapped[str] = identifier()
    token_hash: Mapped[str] = mapped_column(String(128), unique=True)
    user_id: Mapped[str | None] = mapped_column(String(32), ForeignKey("user.id"), index=True)
    for_operator: Mapped[bool]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]  # or taken back


class ApiKey(Base):
    __tablename__ = "api_key"
    id: Mapped[str] = identifier()
    user_id: Mapped[str] = reference("user.id")
    key_hash: Mapped[str] = mapped_column(String(128), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    hint: Mapped[str] = mapped_column(String(16), server_default="")  # how the key ends
    max_requests: Mapped[int | None]  # at once; null: as many as its user may have

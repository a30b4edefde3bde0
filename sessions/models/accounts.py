"""Who uses the service: users, their logins in browsers, their keys of the API."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from sessions.models.base import Base, identifier, reference


class User(Base):
    __tablename__ = "user"
    id: Mapped[str] = identifier()
    created_at: Mapped[datetime]


class Login(Base):
    __tablename__ = "login"
    id: Mapped[str] = identifier()
    user_id: Mapped[str] = reference("user.id")
    token_hash: Mapped[str] = mapped_column(String(128), unique=True)
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


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

"""Making, listing and revoking keys, for the command line; the server may run meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from app.api.keys import HINT_CHARS, hash_key, new_key
from sessions.database import Database
from sessions.records import ApiKey
from sessions.repository import Repository

T = TypeVar("T")


def create_key(
    db_path: Path, name: str, user_id: str | None, max_requests: int | None
) -> tuple[str, ApiKey]:
    """A new key, which is told this once, and its record. Raises NotFound and SessionsError."""
    key = new_key()

    async def create(repository: Repository) -> ApiKey:
        return await repository.create_api_key(
            name, hash_key(key), key[-HINT_CHARS:], user_id=user_id, max_requests=max_requests
        )

    return key, _run(db_path, create)


def list_keys(db_path: Path) -> list[ApiKey]:
    """All keys, revoked ones included. Raises SessionsError."""
    return _run(db_path, Repository.api_keys)


def revoke_key(db_path: Path, key_id: str) -> bool:
    """False when there is no such key that is valid. Raises SessionsError."""
    return _run(db_path, lambda repository: repository.revoke_api_key(key_id))


def key_line(key: ApiKey) -> str:
    """One line of the list."""
    limit = "" if key.max_requests is None else f", up to {key.max_requests} requests at once"
    state = "valid" if key.revoked_at is None else f"revoked {key.revoked_at:%Y-%m-%d %H:%M} UTC"
    return (
        f"{key.id}  rj-...{key.hint}  {key.name}  user {key.user_id}  "
        f"made {key.created_at:%Y-%m-%d %H:%M} UTC  {state}{limit}"
    )


def _run(db_path: Path, work: Callable[[Repository], Awaitable[T]]) -> T:
    async def run() -> T:
        database = await Database.open(db_path)
        try:
            return await work(Repository(database))
        finally:
            await database.close()

    return asyncio.run(run())

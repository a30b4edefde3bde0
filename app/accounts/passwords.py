"""Passwords: hashed and checked by Argon2, away from the event loop."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from app.faults import InvalidField, TooManyTries

T = TypeVar("T")

MIN_CHARS, MAX_CHARS = 8, 1024
PASSWORD_RULE = f"{MIN_CHARS} to {MAX_CHARS:,} characters, of any kind"
WAITING = 16  # for a check; each takes about 50 ms and 64 MiB, one after the other
RETRY_S = 5


def clean_password(text: str, field: str = "password") -> str:
    """A new password as it is hashed. Raises InvalidField."""
    password = normalised(text)
    if not MIN_CHARS <= len(password) <= MAX_CHARS:
        raise InvalidField(
            field, f"This password has {len(password):,} characters; {PASSWORD_RULE}."
        )
    return password


def normalised(text: str) -> str:
    """A password however the keyboard composed its characters."""
    return unicodedata.normalize("NFKC", text)


class Passwords:
    """Owns one thread, so that guessing takes at most one core. Event loop only."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="passwords")
        self._waiting = 0
        self._unknown: str | None = None  # a hash that no password has

    async def hash(self, password: str) -> str:
        """Raises TooManyTries."""
        return await self._run(self._hash, password)

    async def matches(self, stored: str | None, password: str) -> bool:
        """Whether the password is that of the hash; as much work when there is no hash.

        Raises TooManyTries.
        """
        return await self._run(self._matches, stored, normalised(password))

    def is_outdated(self, stored: str) -> bool:
        """Whether a hash was made at a cost that is no longer ours."""
        return self._hasher.check_needs_rehash(stored)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        if self._waiting >= WAITING:
            raise TooManyTries(RETRY_S)
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, work, *arguments)
        finally:
            self._waiting -= 1

    def _hash(self, password: str) -> str:
        return self._hasher.hash(password.encode("utf-8", "surrogatepass"))

    def _matches(self, stored: str | None, password: str) -> bool:
        if self._unknown is None:
            self._unknown = self._hasher.hash(b"of nobody")
        secret = password.encode("utf-8", "surrogatepass")
        usable = stored is not None and len(password) <= MAX_CHARS
        try:
            found = self._hasher.verify(stored if usable and stored else self._unknown, secret)
        except (VerificationError, InvalidHashError):
            return False
        return found and usable

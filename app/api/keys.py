"""Who calls: a bearer key, known to the database as a hash only. Cookies mean nothing here."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from hashlib import sha256

from app.api.errors import ApiError
from app.api.requests import ApiRequest
from sessions.repository import Repository

KEY_PREFIX = "rj-"
HINT_CHARS = 4
_KEY = re.compile(r"rj-[A-Za-z0-9_-]{43}", re.ASCII)  # 32 bytes in URL-safe base 64


@dataclass(frozen=True)
class Caller:
    """The key's user, and how much the key may ask at once."""

    user_id: str
    key_id: str
    max_requests: int | None


def new_key() -> str:
    """A random key, to be shown once."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What the database keeps of a key: SHA-256 in hex. It is random, so unsalted."""
    return sha256(key.encode()).hexdigest()


async def caller_of(request: ApiRequest, repository: Repository) -> Caller:
    """The caller, by the Authorization header alone. Raises ApiError (401)."""
    given = request.headers.getall("authorization", [])
    if not given:
        raise _refused("You did not provide an API key: send it as 'Authorization: Bearer KEY'.")
    scheme, _, key = given[0].partition(" ")
    found = None
    if len(given) == 1 and scheme.lower() == "bearer" and _KEY.fullmatch(key.strip()):
        found = await repository.api_key(hash_key(key.strip()))
    if found is None:
        raise _refused("The API key is not valid, or it was revoked.")
    return Caller(found.user_id, found.id, found.max_requests)


def _refused(message: str) -> ApiError:
    return ApiError(message, status=401, kind="authentication_error", code="invalid_api_key")

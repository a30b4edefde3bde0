"""Addresses of static files that change with their content, so that they can be kept for ever."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from litestar.types import Message, Scope

from app.security.scope import add_header

STATIC = Path(__file__).parent / "static"
PREFIX = "/static/"


class AssetUrls:
    """Owns the digests of the files in one directory, each read once."""

    def __init__(self, directory: Path = STATIC) -> None:
        self._directory = directory
        self._urls: dict[str, str] = {}

    def url(self, name: str) -> str:
        """The address of a file. One that is missing keeps its bare name, and answers 404."""
        if name not in self._urls:
            path = self._directory / name
            version = ""
            if path.is_file():
                version = "?v=" + blake2b(path.read_bytes(), digest_size=8).hexdigest()
            self._urls[name] = f"{PREFIX}{name}{version}"
        return self._urls[name]


async def keep_versioned_assets(message: Message, scope: Scope) -> None:
    """Let browsers keep a static file whose address names its content."""
    if (
        message["type"] == "http.response.start"
        and scope["path"].startswith(PREFIX)
        and scope["query_string"].startswith(b"v=")
        and message["status"] in (200, 304)
    ):
        add_header(message, b"cache-control", "public, max-age=31536000, immutable")

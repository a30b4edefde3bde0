"""Keys and clients for tests of the API."""

from __future__ import annotations

from typing import Any

import httpx
from openai import AsyncOpenAI

from app.api.keys import hash_key, new_key
from tests.app.web_client import Server

MODEL = "fake"


async def make_key(server: Server, **options: Any) -> str:
    """A key of a new user, or of `user_id`."""
    key = new_key()
    repository = server.app.state.repository
    await repository.create_api_key("test", hash_key(key), key[-4:], **options)
    return key


def openai_client(server: Server, key: str, **options: Any) -> AsyncOpenAI:
    """The official client as people use it, but for its retries."""
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, **{"max_retries": 0, **options})


def raw_client(server: Server, key: str | None) -> httpx.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=f"{server.url}/v1", headers=headers, timeout=10)


def chat_body(text: str = "Hello", **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **options}

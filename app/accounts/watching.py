"""Event streams last no longer than the login that opened them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator

from app.security.login import login_hash
from app.services import HTTPRequest, Services

CHECK_S = 10.0  # a stream says something at least this often


async def while_signed_in(
    request: HTTPRequest, services: Services, events: AsyncIterator[bytes]
) -> AsyncGenerator[bytes, None]:
    """Pass events on until the request's login is found ended.

    There is no close event then: the browser asks again, and is refused.
    """
    login = login_hash(request.scope)
    checked = time.monotonic()
    try:
        async for event in events:
            if time.monotonic() - checked >= CHECK_S:
                if login is None or await services.repository.user_by_token(login) is None:
                    return
                checked = time.monotonic()
            yield event
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()

"""What all pages show, and the first one."""

from __future__ import annotations

import secrets
from typing import Any

from app.chat_list import chat_list
from app.faults import NoSuchPage
from app.services import HTTPRequest, Services
from app.views import Problem
from sessions.records import Chat


async def sidebar(
    services: Services,
    user_id: str | None,
    *,
    current: str | None = None,
    after: str = "",
    shown: int = 0,
) -> dict[str, Any]:
    """The chat list: the latest ones (no fewer than `shown`), or those after a place in it."""
    return await chat_list(services, user_id, current=current, after=after, shown=shown)


async def home_page(
    services: Services,
    request: HTTPRequest,
    user_id: str | None,
    *,
    after: str = "",
    text: str = "",
    assistant_id: str | None = None,
    problem: Problem | None = None,
) -> str:
    """The page that begins a chat."""
    assistants = await services.repository.assistants(user_id)
    known = [one.id for one in assistants]
    chosen = assistant_id if assistant_id in known else next(iter(known), None)
    context = await sidebar(services, user_id, after=after)
    context |= {
        "assistants": assistants,
        "chosen_assistant_id": chosen,
        "submission": secrets.token_hex(16),
        "autofocus": True,
        "text": text,
        "problem": problem,
    }
    return services.views.page(request, "home.html", context)


async def own_chat(services: Services, user_id: str | None, chat_id: str) -> Chat:
    """The chat, if it is this user's. Raises NoSuchPage."""
    chat = None if user_id is None else await services.repository.chat(user_id, chat_id)
    if chat is None:
        raise NoSuchPage
    return chat

"""What the pages and fragments of chats show, gathered from database and running turns."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup

from app.faults import NoSuchPage
from app.security import csrf_token
from app.services import HTTPRequest, Services
from app.streams import LiveTurn
from app.views import AnswerView, ComposerView, Problem, composer_view
from sessions.records import Chat, Message, Turn

SIDEBAR_CHATS = 50
LOOKS = 20


async def sidebar(
    services: Services,
    user_id: str | None,
    *,
    current: str | None = None,
    before: datetime | None = None,
) -> dict[str, Any]:
    """The chat list: the latest ones, or those before a time."""
    chats = []
    if user_id is not None:
        chats = await services.repository.chats(user_id, limit=SIDEBAR_CHATS, before=before)
    older = chats[-1].updated_at.isoformat() if len(chats) == SIDEBAR_CHATS else ""
    return {"chats": chats, "current_chat_id": current, "older_before": older}


async def home_page(
    services: Services,
    request: HTTPRequest,
    user_id: str | None,
    *,
    before: datetime | None = None,
    text: str = "",
    assistant_id: str | None = None,
    problem: Problem | None = None,
) -> str:
    """The page that begins a chat."""
    assistants = await services.repository.assistants(user_id)
    known = [one.id for one in assistants]
    chosen = assistant_id if assistant_id in known else next(iter(known), None)
    context = await sidebar(services, user_id, before=before)
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


async def settled_path(services: Services, chat_id: str) -> tuple[list[Message], LiveTurn | None]:
    """The active branch and its running turn, of one moment.

    A turn is in the database before it is live, and is live until the database has its end.
    """
    for _ in range(LOOKS):
        path = await services.repository.path(chat_id)
        live = services.hub.of_chat(chat_id)
        running_id = path[-1].id if path and path[-1].status == "running" else None
        if running_id == (live.message_id if live else None):
            break
        await asyncio.sleep(0.01)  # it began or ended between the two looks
    return path, live


async def composer(
    services: Services, chat: Chat, path: list[Message], *, running: bool
) -> ComposerView:
    prefix = await services.repository.prefix_by_id(chat.prefix_id)
    return composer_view(
        chat,
        path,
        prefix_tokens=len(prefix.token_ids),
        limit=services.chat.context_limit,
        running=running,
    )


async def chat_page(
    services: Services,
    request: HTTPRequest,
    chat: Chat,
    *,
    text: str = "",
    problem: Problem | None = None,
) -> str:
    """A chat with all its messages; what runs shows its text so far."""
    path, live = await settled_path(services, chat.id)
    latencies = await services.repository.chat_latency(chat.id)
    latency_of = {one.message_id: one.latency for one in latencies}
    conversation: list[Message | AnswerView] = []
    for message in path:
        if message.role == "user":
            conversation.append(message)
        else:
            is_last = message is path[-1]
            conversation.append(
                services.views.answer(
                    message,
                    live=live if is_last else None,
                    latency=latency_of.get(message.id),
                    last=is_last,
                )
            )
            await asyncio.sleep(0)  # rendering a long chat for the first time takes a while
    context = await sidebar(services, chat.user_id, current=chat.id)
    context |= {
        "chat": chat,
        "conversation": conversation,
        "composer": await composer(services, chat, path, running=live is not None),
        "text": text,
        "problem": problem,
        "autofocus": True,
    }
    return services.views.page(request, "chat.html", context)


async def started_fragment(
    services: Services, request: HTTPRequest, chat: Chat, turn: Turn, name: str
) -> str:
    """What a page of the chat needs after a turn was started: `sent.html` or `retried.html`."""
    repository = services.repository
    path = await repository.path(chat.id, turn.message_id)
    live = services.hub.get(turn.id)
    question, answer = path[-2:]
    latency = None
    if live is None:  # it has ended already
        path = await repository.path(chat.id, turn.message_id)
        answer = path[-1]
        latency = await _latency(services, chat.id, turn.message_id)
    context = await sidebar(services, chat.user_id, current=chat.id)
    context |= {
        "csrf_token": csrf_token(request),
        "message": question,
        "answer": services.views.answer(answer, live=live, latency=latency, last=True),
        "composer": await composer(services, chat, path, running=live is not None),
        "text": "",
        "autofocus": False,
    }
    return services.views.fragment(name, **context)


async def ended_fragment(
    services: Services, chat: Chat, message_id: str, token: str, *, unseen: str = ""
) -> str:
    """What replaces a running answer after its end; `unseen` is what was not yet announced of it.

    `token` is the page's CSRF token. Raises NoSuchPage.
    """
    repository = services.repository
    message = await repository.message(chat.id, message_id)
    if message is None:
        raise NoSuchPage
    path = await repository.path(chat.id)
    return services.views.fragment(
        "finished_frame.html",
        csrf_token=token,
        announced=Markup(unseen).striptags(),
        answer=services.views.answer(
            message,
            latency=await _latency(services, chat.id, message_id),
            last=bool(path) and path[-1].id == message_id,
        ),
        composer=await composer(
            services, chat, path, running=services.hub.of_chat(chat.id) is not None
        ),
    )


async def _latency(services: Services, chat_id: str, message_id: str) -> Any:
    records: Sequence[Any] = await services.repository.chat_latency(chat_id)
    return next((one.latency for one in records if one.message_id == message_id), None)

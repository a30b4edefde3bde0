"""The message that waits for the end of an answer: withdrawn, or sent after all."""

from __future__ import annotations

from litestar import Response, post
from litestar.params import FromPath

from app import chat_pages, pages
from app.errors import DomainError
from app.routes.browser import form_field, go_to, html, user_id_of
from app.routes.turns import not_sent
from app.services import HTTPRequest, UseServices, is_fragment


@post("/chats/{chat_id:str}/queued/withdraw", include_in_schema=False)
async def withdraw(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    """Put the queued message back into the composer, before what is written there."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    written = await form_field(request, "text")
    queued = await services.repository.withdraw_queued(chat_id) or ""
    text = "\n\n".join(part for part in (queued, written) if part.strip())
    if is_fragment(request):
        return html(await chat_pages.queue_fragment(services, request, chat, text=text))
    return html(await chat_pages.chat_page(services, request, chat, text=text))


@post("/chats/{chat_id:str}/queued/send", include_in_schema=False)
async def send_now(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    """Send a queued message that waits for its user."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    try:
        await services.chat.queued.send_now(chat)
    except DomainError as error:
        return await not_sent(request, services, chat, error, await form_field(request, "text"))
    if not is_fragment(request):
        return go_to(request, f"/chats/{chat_id}#composer")
    return html(await chat_pages.conversation_fragment(services, request, chat))


HANDLERS = [withdraw, send_now]

"""The list of chats: its pages, search, and what a person does to a chat as a whole."""

from __future__ import annotations

from litestar import Response, get, post
from litestar.params import FromPath, FromQuery

from app import pages
from app.chat_list import chat_list
from app.faults import NoSuchPage
from app.history.search import find
from app.message_text import clean_title
from app.routes.browser import form_field, go_to, html, user_id_of
from app.security import csrf_token
from app.services import HTTPRequest, Services, UseServices, chats_shown, is_fragment


@get("/chat-list", include_in_schema=False)
async def items(
    request: HTTPRequest,
    services: UseServices,
    after: FromQuery[str] = "",
    current: FromQuery[str] = "",
) -> Response[str]:
    """The list's next page, which takes the place of the link to it."""
    user_id = await user_id_of(request)
    context = await chat_list(services, user_id, current=current, after=after)
    return html(
        services.views.fragment("chat_items.html", csrf_token=csrf_token(request), **context)
    )


@get("/search", include_in_schema=False)
async def search(
    request: HTTPRequest,
    services: UseServices,
    q: FromQuery[str] = "",
    before: FromQuery[str] = "",
) -> Response[str]:
    """What is found in the user's own chats; as a fragment it stands above the list."""
    user_id = await user_id_of(request)
    place = int(before) if before.isascii() and before.isdigit() and len(before) < 19 else None
    results = await find(services.repository, user_id or "", q, before=place)
    context = {"results": results, "csrf_token": csrf_token(request)}
    if is_fragment(request):
        return html(services.views.fragment("search_found.html", **context).strip())
    context |= await pages.sidebar(services, user_id)
    return html(services.views.page(request, "search.html", {**context, "query": q}))


@post("/chats/{chat_id:str}/rename", include_in_schema=False)
async def rename(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    title = clean_title(await form_field(request, "title"))
    if not await services.repository.rename_chat(chat.user_id, chat_id, title):
        raise NoSuchPage
    return await _changed(request, services, chat.user_id, f"/chats/{chat_id}", renamed=title)


@post("/chats/{chat_id:str}/pin", include_in_schema=False)
async def pin(request: HTTPRequest, services: UseServices, chat_id: FromPath[str]) -> Response[str]:
    """Keep a chat at the top of the list; with `pinned` empty, no longer."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    pinned = bool(await form_field(request, "pinned"))
    if not await services.repository.pin_chat(chat.user_id, chat_id, pinned):
        raise NoSuchPage
    return await _changed(request, services, chat.user_id, f"/chats/{chat_id}")


@post("/chats/{chat_id:str}/delete", include_in_schema=False)
async def delete(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    """Out of sight at once; `undo` brings it back until it is purged."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    if not await services.chat.delete(chat.user_id, chat_id):
        raise NoSuchPage
    if await form_field(request, "current") == chat_id:
        return go_to(request, "/")
    return await _changed(request, services, chat.user_id, "/")


@post("/chats/{chat_id:str}/undo", include_in_schema=False)
async def undo(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    """Bring a deleted chat back. Raises NoSuchPage when it has been purged."""
    user_id = await user_id_of(request)
    if user_id is None or not await services.repository.restore_chat(user_id, chat_id):
        raise NoSuchPage
    await services.chat.queued.answer_ended(chat_id)  # the deletion ended what ran
    return await _changed(request, services, user_id, f"/chats/{chat_id}")


async def _changed(
    request: HTTPRequest, services: Services, user_id: str, path: str, *, renamed: str = ""
) -> Response[str]:
    """The chat list as it is now, and the open chat's title when that was changed."""
    if not is_fragment(request):
        return go_to(request, path)
    current = await form_field(request, "current")
    shown = chats_shown(request)
    context = await chat_list(services, user_id, current=current, shown=shown)
    if path != f"/chats/{current}":
        renamed = ""
    return html(
        services.views.fragment(
            "chats_changed.html", csrf_token=csrf_token(request), renamed=renamed, **context
        )
    )


HANDLERS = [items, search, rename, pin, delete, undo]

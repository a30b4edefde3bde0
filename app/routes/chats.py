"""What a person does with chats: begin, rename, delete, look at."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from litestar import Response, post
from litestar.params import FromPath

from app import pages
from app.errors import DomainError, problem_of, problem_response
from app.faults import NoSuchPage
from app.message_text import clean_title
from app.routes.browser import form_field, go_to, html, user_id_of
from app.security import csrf_token, ensure_user
from app.services import HTTPRequest, Services, UseServices, is_fragment, received_at
from engine.errors import ContextOverflow


@post("/chats", include_in_schema=False)
async def begin(request: HTTPRequest, services: UseServices) -> Response[str]:
    """A new chat with its first message. The same form sent twice leads to the same chat.

    A form that was filled in anew (the page came back by Back) or whose chat was deleted since
    begins another one.
    """
    user = await ensure_user(request)
    text = await form_field(request, "text")
    assistant_id = await form_field(request, "assistant_id")
    submission = await form_field(request, "submission")
    received = received_at(request)

    async def start() -> str:
        turn = await services.chat.start_chat(user.id, assistant_id, text, received_at=received)
        return turn.chat_id

    try:
        chat_id = await services.submissions.once(
            user.id, submission and _digest(submission, assistant_id, text), start
        )
        if await services.repository.chat(user.id, chat_id) is None:
            chat_id = await start()
    except DomainError as error:
        problem = problem_of(error)
        if isinstance(error, ContextOverflow):
            problem = replace(problem, hint="Shorten the message.", link="")
        if is_fragment(request):
            return problem_response(request, services.views, problem)
        page = await pages.home_page(
            services, request, user.id, text=text, assistant_id=assistant_id, problem=problem
        )
        return html(page, problem=problem)
    return go_to(request, f"/chats/{chat_id}")


@post("/chats/{chat_id:str}/rename", include_in_schema=False)
async def rename(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    title = clean_title(await form_field(request, "title"))
    if not await services.repository.rename_chat(chat.user_id, chat_id, title):
        raise NoSuchPage
    return await _changed(request, services, chat.user_id, f"/chats/{chat_id}", renamed=title)


@post("/chats/{chat_id:str}/delete", include_in_schema=False)
async def delete(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    if not await services.chat.delete(chat.user_id, chat_id):
        raise NoSuchPage
    if await form_field(request, "current") == chat_id:
        return go_to(request, "/")
    return await _changed(request, services, chat.user_id, "/")


@post("/chats/{chat_id:str}/warm", include_in_schema=False, status_code=204)
async def warm(request: HTTPRequest, services: UseServices, chat_id: FromPath[str]) -> None:
    """The chat is on a screen: bring its state back before the next message is sent."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    await services.chat.warm(chat)


def _digest(*fields: str) -> str:
    """What tells one filled-in form from another."""
    return sha256("\0".join(fields).encode("utf-8", "surrogatepass")).hexdigest()


async def _changed(
    request: HTTPRequest, services: Services, user_id: str, path: str, *, renamed: str = ""
) -> Response[str]:
    """The chat list as it is now, and the open chat's title when that was changed."""
    if not is_fragment(request):
        return go_to(request, path)
    current = await form_field(request, "current")
    context = await pages.sidebar(services, user_id, current=current)
    if path != f"/chats/{current}":
        renamed = ""
    return html(
        services.views.fragment(
            "chats_changed.html", csrf_token=csrf_token(request), renamed=renamed, **context
        )
    )


HANDLERS = [begin, rename, delete, warm]

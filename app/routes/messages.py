"""What can be done with a message: asked otherwise, answered again, gone on with, read exactly."""

from __future__ import annotations

from typing import Any

from litestar import Response, get, post
from litestar.enums import MediaType
from litestar.params import FromPath

from app import chat_pages, pages
from app.errors import DomainError
from app.faults import NoSuchPage
from app.routes.browser import form_field, go_to, html, number_of_answers, user_id_of
from app.routes.turns import not_sent
from app.security import csrf_token
from app.services import HTTPRequest, Services, UseServices, is_fragment, received_at
from app.timeline import timelines_of
from sessions.records import Chat, Message


@get("/messages/{message_id:str}/edit", include_in_schema=False)
async def edit_form(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """The field to ask otherwise."""
    chat, message = await _message(request, services, message_id)
    if message.role != "user":
        raise NoSuchPage
    return await _part(request, services, chat, "edit.html", "Ask otherwise", message=message)


@get("/messages/{message_id:str}/again", include_in_schema=False)
async def compare_form(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """How many answers there are to be beside this one."""
    chat, message = await _message(request, services, message_id)
    if message.role != "assistant":
        raise NoSuchPage
    return await _part(request, services, chat, "compare.html", "Answer again", message=message)


@get("/messages/{message_id:str}/timeline", include_in_schema=False)
async def timeline(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """Where the time of an answer went, turn by turn."""
    chat, message = await _message(request, services, message_id)
    measured = await services.repository.chat_latency(chat.id)
    turns = timelines_of([one.latency for one in measured if one.message_id == message_id])
    heading = "Where the time went"
    return await _part(
        request, services, chat, "timeline.html", heading, message=message, timelines=turns
    )


@post("/messages/{message_id:str}/edit", include_in_schema=False)
async def edit(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """Ask otherwise: a branch beside this message, with new answers."""
    chat = await _chat_of(request, services, message_id)
    text = await form_field(request, "edited")
    try:
        [turn, *_] = await services.chat.edit(
            chat,
            message_id,
            text,
            answers=await number_of_answers(request),
            received_at=received_at(request),
        )
    except DomainError as error:
        return await not_sent(request, services, chat, error, text)
    return await _changed(request, services, chat, turn.message_id)


@post("/messages/{message_id:str}/again", include_in_schema=False)
async def answer_again(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """Other answers to the same question, beside this one."""
    chat = await _chat_of(request, services, message_id)
    [turn, *_] = await services.chat.answer_again(
        chat,
        message_id,
        answers=await number_of_answers(request),
        received_at=received_at(request),
    )
    return await _changed(request, services, chat, turn.message_id)


@post("/messages/{message_id:str}/retry", include_in_schema=False)
async def retry(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """Answer the last message again after its answer was cut short."""
    chat = await _chat_of(request, services, message_id)
    turn = await services.chat.retry(chat, message_id, received_at=received_at(request))
    return await _changed(request, services, chat, turn.message_id)


@post("/messages/{message_id:str}/continue", include_in_schema=False)
async def go_on(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """Go on with the last answer, in the same message."""
    chat = await _chat_of(request, services, message_id)
    try:
        await services.chat.go_on(chat, message_id, received_at=received_at(request))
    except DomainError as error:
        return await not_sent(request, services, chat, error, "")
    return await _changed(request, services, chat, message_id)


@post("/messages/{message_id:str}/select", include_in_schema=False)
async def select(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """Show the branch of this message and go on from there."""
    chat = await _chat_of(request, services, message_id)
    await services.chat.select(chat, message_id)
    return await _changed(request, services, chat, message_id)


@get("/messages/{message_id:str}/text", include_in_schema=False)
async def text(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """The message as it is stored, for copying."""
    _, message = await _message(request, services, message_id)
    return Response(message.text, media_type=MediaType.TEXT)


async def _chat_of(request: HTTPRequest, services: Services, message_id: str) -> Chat:
    """The chat of a message of this user. Raises NoSuchPage."""
    user_id = await user_id_of(request)
    chat_id = user_id and await services.repository.chat_of_message(user_id, message_id)
    return await pages.own_chat(services, user_id, chat_id or "")


async def _message(
    request: HTTPRequest, services: Services, message_id: str
) -> tuple[Chat, Message]:
    """A message of this user, and its chat. Raises NoSuchPage."""
    chat = await _chat_of(request, services, message_id)
    message = await services.repository.message(chat.id, message_id)
    if message is None:
        raise NoSuchPage
    return chat, message


async def _part(
    request: HTTPRequest, services: Services, chat: Chat, name: str, heading: str, **context: Any
) -> Response[str]:
    """What opens at a message: for scripts the part itself, else a page with it."""
    if is_fragment(request):
        return html(services.views.fragment(name, csrf_token=csrf_token(request), **context))
    context |= await pages.sidebar(services, chat.user_id, current=chat.id)
    context |= {"heading": heading, "part": f"fragments/{name}"}
    return html(services.views.page(request, "message.html", context))


async def _changed(
    request: HTTPRequest, services: Services, chat: Chat, message_id: str
) -> Response[str]:
    """The conversation as it is now, seen from this message."""
    if not is_fragment(request):
        return go_to(request, f"/chats/{chat.id}#message-{message_id}")
    return html(await chat_pages.conversation_fragment(services, request, chat))


HANDLERS = [edit_form, compare_form, timeline, edit, answer_again, retry, go_on, select, text]

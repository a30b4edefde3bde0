"""Messages, their running answers, and the event streams of those."""

from __future__ import annotations

from litestar import Response, get, post
from litestar.params import FromPath

from app import pages
from app.errors import DomainError, problem_of, problem_response
from app.faults import NoSuchPage
from app.routes.browser import form_field, go_to, html, user_id_of
from app.security import csrf_token, login_digest
from app.services import HTTPRequest, Services, UseServices, is_fragment, received_at
from app.streams import EventStream, finished_stream
from sessions.records import Chat


@post("/chats/{chat_id:str}/messages", include_in_schema=False)
async def send(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    """Append a message by its parent's id, and begin the answer."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    text = await form_field(request, "text")
    parent_id = await form_field(request, "parent_id") or None
    try:
        turn = await services.chat.send_message(
            chat, parent_id, text, received_at=received_at(request)
        )
    except DomainError as error:
        problem = problem_of(error)
        if is_fragment(request):
            return problem_response(request, services.views, problem)
        page = await pages.chat_page(services, request, chat, text=text, problem=problem)
        return html(page, problem=problem)
    if not is_fragment(request):
        return go_to(request, f"/chats/{chat_id}#message-{turn.message_id}")
    return html(await pages.started_fragment(services, request, chat, turn, "sent.html"))


@post("/messages/{message_id:str}/retry", include_in_schema=False)
async def retry(
    request: HTTPRequest, services: UseServices, message_id: FromPath[str]
) -> Response[str]:
    """Answer the last message again after its answer was cut short."""
    user_id = await user_id_of(request)
    chat_id = user_id and await services.repository.chat_of_message(user_id, message_id)
    chat = await pages.own_chat(services, user_id, chat_id or "")
    turn = await services.chat.retry(chat, message_id, received_at=received_at(request))
    if not is_fragment(request):
        return go_to(request, f"/chats/{chat.id}#message-{turn.message_id}")
    return html(await pages.started_fragment(services, request, chat, turn, "retried.html"))


@post("/turns/{turn_id:str}/stop", include_in_schema=False)
async def stop(
    request: HTTPRequest, services: UseServices, turn_id: FromPath[str]
) -> Response[str]:
    """Stop an answer; the response comes when the engine has confirmed it."""
    chat, message_id = await _turn(request, services, turn_id)
    await services.chat.stop(turn_id)
    if not is_fragment(request):
        return go_to(request, f"/chats/{chat.id}#message-{message_id}")
    token = csrf_token(request)
    return html(await pages.ended_fragment(services, chat, message_id, token))


@get("/turns/{turn_id:str}/events", include_in_schema=False)
async def events(
    request: HTTPRequest, services: UseServices, turn_id: FromPath[str]
) -> EventStream:
    """The answer so far, then live; one final event and close for a turn that has ended."""
    chat, message_id = await _turn(request, services, turn_id)
    token = csrf_token(request)

    async def finished(unseen: str) -> str:
        try:
            return await pages.ended_fragment(services, chat, message_id, token, unseen=unseen)
        except DomainError as error:  # the chat was deleted meanwhile
            problem = problem_of(error)
            return services.views.fragment(
                "failed_frame.html", message_id=message_id, problem=problem
            )

    live = services.hub.get(turn_id)
    if live is None:
        return EventStream(finished_stream(finished))
    return EventStream(services.hub.watch(live, finished, browser=login_digest(request.scope)))


async def _turn(request: HTTPRequest, services: Services, turn_id: str) -> tuple[Chat, str]:
    """The chat and the answer's message id of a turn of this user. Raises NoSuchPage."""
    user_id = await user_id_of(request)
    turn = user_id and await services.repository.turn(user_id, turn_id)
    if not turn:
        raise NoSuchPage
    return await pages.own_chat(services, user_id, turn.chat_id), turn.message_id


HANDLERS = [send, retry, stop, events]

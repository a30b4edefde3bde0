"""Questions, their running answers, and the event streams of those."""

from __future__ import annotations

from dataclasses import replace

from litestar import Response, get, post
from litestar.params import FromPath

from app import chat_pages, pages
from app.accounts.watching import while_signed_in
from app.errors import DomainError, problem_of, problem_response
from app.faults import NoSuchPage
from app.group_stream import watch_group
from app.routes.browser import form_field, go_to, html, number_of_answers, user_id_of
from app.security import csrf_token, login_digest
from app.services import HTTPRequest, Services, UseServices, is_fragment, received_at
from app.streams import EventStream, finished_stream
from app.views import Problem
from engine.errors import ContextOverflow
from sessions.records import Chat, Turn


@post("/chats/{chat_id:str}/messages", include_in_schema=False)
async def send(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    """Append a message by its parent's id and begin its answers; behind a running one it waits."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    text = await form_field(request, "text")
    parent_id = await form_field(request, "parent_id") or None
    try:
        turns = await services.chat.send(
            chat,
            parent_id,
            text,
            answers=await number_of_answers(request),
            received_at=received_at(request),
        )
    except DomainError as error:
        return await not_sent(request, services, chat, error, text)
    if not is_fragment(request):
        place = f"message-{turns[0].message_id}" if turns else "composer"
        return go_to(request, f"/chats/{chat_id}#{place}")
    if not turns:
        return html(await chat_pages.queue_fragment(services, request, chat))
    return html(await chat_pages.sent_fragment(services, request, chat))


async def not_sent(
    request: HTTPRequest, services: Services, chat: Chat, error: Exception, text: str
) -> Response[str]:
    """Say why; the page of a browser without scripts has the text again."""
    problem = problem_of(error)
    if isinstance(error, ContextOverflow) and chat.active_leaf_id:
        problem = replace(problem, carry_from=chat.id)
    if is_fragment(request):
        return problem_response(request, services.views, problem)
    page = await chat_pages.chat_page(services, request, chat, text=text, problem=problem)
    return html(page, problem=problem)


@post("/turns/{turn_id:str}/stop", include_in_schema=False)
async def stop(
    request: HTTPRequest, services: UseServices, turn_id: FromPath[str]
) -> Response[str]:
    """Stop an answer, or with `all` those beside it too, once the engine has confirmed it."""
    chat, turn = await _turn(request, services, turn_id)
    if await form_field(request, "all"):
        await services.chat.stop_all(chat.id)
    else:
        await services.chat.stop(turn_id)
    message_id = turn.message_id
    if not is_fragment(request):
        return go_to(request, f"/chats/{chat.id}#message-{message_id}")
    token = csrf_token(request)
    message = await services.repository.message(chat.id, message_id)
    if message is None or message.group_id is None:
        return html(await chat_pages.ended_fragment(services, chat, message_id, token))
    group = await services.repository.candidates(chat.id, message.group_id)
    if services.hub.of_chat(chat.id) is not None:  # the others are still written
        return html(await chat_pages.candidate_fragment(services, chat, message_id, token))
    ids = [one.id for one in group]
    return html(await chat_pages.candidates_fragment(services, chat, message.group_id, token, ids))


@get("/turns/{turn_id:str}/events", include_in_schema=False)
async def events(
    request: HTTPRequest, services: UseServices, turn_id: FromPath[str]
) -> EventStream:
    """The answer so far, then live; one final event and close for a turn that has ended."""
    chat, turn = await _turn(request, services, turn_id)
    token = csrf_token(request)
    message_id = turn.message_id

    async def finished(unseen: str) -> str:
        try:
            return await chat_pages.ended_fragment(services, chat, message_id, token, unseen=unseen)
        except DomainError as error:  # the chat was deleted meanwhile
            return _gone(services, f"message-{message_id}", problem_of(error))

    live = services.hub.get(turn_id)
    if live is None:
        return EventStream(finished_stream(finished))
    watched = services.hub.watch(live, finished, browser=login_digest(request.scope))
    return EventStream(while_signed_in(request, services, watched))


@get("/turns/{turn_id:str}/candidates", include_in_schema=False)
async def candidate_events(
    request: HTTPRequest, services: UseServices, turn_id: FromPath[str]
) -> EventStream:
    """The same for all the answers that are written side by side with that of a turn."""
    chat, turn = await _turn(request, services, turn_id)
    token = csrf_token(request)
    message = await services.repository.message(chat.id, turn.message_id)
    if message is None or message.group_id is None:
        raise NoSuchPage
    group_id = message.group_id
    ids = [one.id for one in await services.repository.candidates(chat.id, group_id)]
    lives = [live for live in services.hub.running() if live.message_id in ids]

    async def one_ended(message_id: str, unseen: str) -> str:
        try:
            return await chat_pages.candidate_fragment(
                services, chat, message_id, token, unseen=unseen
            )
        except DomainError as error:
            return _gone(services, f"message-{message_id}", problem_of(error))

    async def all_ended(_: str = "") -> str:
        try:
            return await chat_pages.candidates_fragment(services, chat, group_id, token, ids)
        except DomainError as error:
            return _gone(services, f"candidates-{group_id}", problem_of(error))

    if not lives:
        return EventStream(finished_stream(all_ended))
    browser = login_digest(request.scope)
    watched = watch_group(services.hub, lives, one_ended, all_ended, browser=browser)
    return EventStream(while_signed_in(request, services, watched))


def _gone(services: Services, place: str, problem: Problem) -> str:
    return services.views.fragment("failed_frame.html", place=place, problem=problem)


async def _turn(request: HTTPRequest, services: Services, turn_id: str) -> tuple[Chat, Turn]:
    """A turn of this user, and its chat. Raises NoSuchPage."""
    user_id = await user_id_of(request)
    turn = user_id and await services.repository.turn(user_id, turn_id)
    if not turn:
        raise NoSuchPage
    return await pages.own_chat(services, user_id, turn.chat_id), turn


HANDLERS = [send, stop, events, candidate_events]

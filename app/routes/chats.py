"""What begins, warms and carries on a chat."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from litestar import Response, post
from litestar.params import FromPath

from app import chat_pages, pages
from app.errors import DomainError, problem_of, problem_response
from app.routes.browser import form_field, go_to, html, number_of_answers, user_id_of
from app.security import ensure_user
from app.services import HTTPRequest, UseServices, is_fragment, received_at
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
        turn = await services.chat.start_chat(
            user.id,
            assistant_id,
            text,
            answers=await number_of_answers(request),
            received_at=received,
        )
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


@post("/chats/{chat_id:str}/warm", include_in_schema=False, status_code=204)
async def warm(request: HTTPRequest, services: UseServices, chat_id: FromPath[str]) -> None:
    """The chat is on a screen: bring its state back before the next message is sent."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    await services.chat.warm(chat)


@post("/chats/{chat_id:str}/carry-over", include_in_schema=False)
async def carry_over(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    """A new chat that begins with the last exchanges of this one; what is written is sent there.

    The same form sent twice leads to the same chat.
    """
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    text = await form_field(request, "text")

    async def make() -> str:
        return (await services.chat.carry_over(chat)).id

    key = _digest("carry", chat_id, chat.active_leaf_id or "", text)
    new_id = await services.submissions.once(chat.user_id, key, make)
    new = await services.repository.chat(chat.user_id, new_id)
    if new is None:  # it was deleted since
        new = await services.chat.carry_over(chat)
    if text.strip() and new.updated_at == new.created_at:
        try:
            await services.chat.send(
                new, new.active_leaf_id, text, received_at=received_at(request)
            )
        except DomainError as error:
            problem = problem_of(error)
            if is_fragment(request):
                return problem_response(request, services.views, problem)
            page = await chat_pages.chat_page(services, request, new, text=text, problem=problem)
            return html(page, problem=problem)
    return go_to(request, f"/chats/{new.id}")


def _digest(*fields: str) -> str:
    """What tells one filled-in form from another."""
    return sha256("\0".join(fields).encode("utf-8", "surrogatepass")).hexdigest()


HANDLERS = [begin, warm, carry_over]

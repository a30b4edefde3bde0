"""What each error becomes over HTTP; nothing else in the application knows status codes of them."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from litestar import Response
from litestar.enums import MediaType
from litestar.exceptions import HTTPException, MethodNotAllowedException
from litestar.types import ExceptionHandlersMap

from app.accounts.ask import ask_to_sign_in
from app.api.errors import answer_api_error
from app.assistants.service import NotYours
from app.faults import (
    ChatMoved,
    Fault,
    InvalidField,
    NoSuchPage,
    NotContinuable,
    NotRetryable,
    ServerDraining,
    TooManyTries,
    WrongModel,
    WrongPassword,
)
from app.security import SignInRequired
from app.security.middleware import is_api_path
from app.services import HTTPRequest, is_fragment
from app.views import Problem, Views
from engine.errors import ContextOverflow, EngineUnavailable, QueueFull
from sessions.errors import (
    AlreadyQueued,
    DatabaseClosed,
    LinkNotValid,
    NameTaken,
    NotFound,
    NotStored,
    SessionsError,
    StaleParent,
    TurnRunning,
)

logger = logging.getLogger(__name__)

WORDS = {  # for what the framework says in its own
    400: "The server could not read this request.",
    404: "There is no such page.",
    405: "This page cannot be asked in that way.",
    413: "This is larger than what the server takes at once.",
}
DomainError = (Fault, QueueFull, EngineUnavailable, ContextOverflow, SessionsError)
ENGINE_RETRY_S = 5
STORE_RETRY_S = 5


def problem_of(error: Exception) -> Problem:
    """Status, words and way on for an error."""
    match error:
        case WrongPassword():
            return Problem(status=401, text=str(error), field=error.field)
        case InvalidField():
            return Problem(status=400, text=str(error), field=error.field)
        case ContextOverflow():
            return Problem(
                status=413,
                text=f"This message brings the chat to {error.num_tokens:,} tokens; "
                f"the model's context holds {error.limit:,}, the answer included.",
                hint="Shorten the message, or go on in a new chat.",
                link="/",
                link_text="Start a new chat",
            )
        case QueueFull():
            return Problem(
                status=429,
                text="The server is busy: it has as many questions as it takes at once.",
                hint=f"Try again in {_seconds(error.retry_after_s)}; your text is still here.",
                retry_after_s=error.retry_after_s,
            )
        case ServerDraining():
            return Problem(
                status=503,
                text="The server is being restarted.",
                hint=f"Try again in {_seconds(error.retry_after_s)}; your text is still here.",
                retry_after_s=error.retry_after_s,
            )
        case EngineUnavailable():
            return Problem(
                status=503,
                text="The engine is being started again.",
                hint="Try again in a few seconds; your text is still here.",
                retry_after_s=ENGINE_RETRY_S,
            )
        case NotStored() | DatabaseClosed():
            return Problem(
                status=503,
                text=f"The server could not store this: {_why_not_stored(error)}.",
                hint="Nothing is lost. Try again in a few seconds; your text is still here.",
                retry_after_s=STORE_RETRY_S,
            )
        case TurnRunning():
            return _moved("An answer of this chat is still being written.", error.chat_id)
        case StaleParent() | ChatMoved():
            text = "This chat went on in another tab or device since this page was loaded."
            return _moved(text, error.chat_id)
        case AlreadyQueued():
            text = "One message of this chat waits for its answer already; it keeps one."
            hint = "Withdraw that one, or wait until it was sent; your text is still here."
            return _moved(text, error.chat_id, hint=hint)
        case NotYours():
            return Problem(status=403, text=str(error), link="/assistants", link_text="Assistants")
        case NotRetryable() | NotContinuable():
            return _moved(str(error), error.chat_id, hint="")
        case WrongModel():
            return Problem(
                status=409,
                text=str(error),
                hint="Go on in a new chat; your text is still here.",
                link="/",
                link_text="Start a new chat",
            )
        case TooManyTries():
            return Problem(
                status=429,
                text=f"{error} Try again in {_wait(error.retry_after_s)}.",
                retry_after_s=error.retry_after_s,
            )
        case NameTaken():
            return Problem(status=409, text="Somebody has this name; choose another.", field="name")
        case LinkNotValid():
            return Problem(
                status=410,
                text="This link is not valid any more.",
                hint="It was used, taken back, or has expired. Ask for a new one.",
                link="/",
                link_text="To the start",
            )
        case NoSuchPage() | NotFound():
            return Problem(
                status=404,
                text="There is no such page.",
                hint="What it showed may have been deleted.",
                link="/",
                link_text="Back to the start",
            )
        case HTTPException():
            retry = error.headers or {}
            return Problem(
                status=error.status_code,
                text=WORDS.get(error.status_code)
                or error.detail
                or HTTPStatus(error.status_code).phrase,
                retry_after_s=int(retry["Retry-After"]) if "Retry-After" in retry else None,
            )
        case _:
            return Problem(status=500, text="The server failed to do this; its log says why.")


def answer_error(request: HTTPRequest, error: Exception) -> Response[Any]:
    """The response for an error: a fragment, a page or JSON, as was asked for."""
    if is_api_path(request.url.path):
        return answer_api_error(request, error)
    if isinstance(error, SignInRequired):
        return ask_to_sign_in(request, request.app.state.views)
    problem = problem_of(error)
    if problem.status >= 500 and not isinstance(error, EngineUnavailable):
        # The route, not the path: that of an invitation is a secret.
        route = request.scope.get("path_template") or "no route"
        logger.error("%s %s failed", request.method, route, exc_info=error)
    response = problem_response(request, request.app.state.views, problem)
    if isinstance(error, MethodNotAllowedException):
        response.set_header("Allow", (error.headers or {}).get("allow", "GET, HEAD"))
    return response


def problem_response(request: HTTPRequest, views: Views, problem: Problem) -> Response[str]:
    headers = {"Vary": "HX-Request, HX-Request-Type"}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if wants_json(request):
        body, media_type = views.problem_json(problem), MediaType.JSON
    elif is_fragment(request):
        headers |= {"HX-Retarget": "#notice", "HX-Reswap": "innerHTML"}
        body, media_type = views.fragment("problem.html", problem=problem), MediaType.HTML
    else:
        body, media_type = views.problem_page(request, problem), MediaType.HTML
    return Response(body, status_code=problem.status, headers=headers, media_type=media_type)


def _why_not_stored(error: NotStored | DatabaseClosed) -> str:
    match error:
        case NotStored(reason="database or disk is full"):
            return "its disk is full"
        case NotStored(reason="database is locked"):
            return "another program holds its database"
        case NotStored():
            return error.reason
        case _:
            return "its database is closed"


def _seconds(number: int) -> str:
    return "a second" if number == 1 else f"{number} seconds"


def _wait(seconds: int) -> str:
    return _seconds(seconds) if seconds < 90 else f"{round(seconds / 60)} minutes"


def wants_json(request: HTTPRequest) -> bool:
    path = request.url.path
    return path.endswith(".json") or path in ("/health", "/healthz", "/readyz")


def _moved(text: str, chat_id: str, *, hint: str = "Your text is still here.") -> Problem:
    return Problem(
        status=409,
        text=text,
        hint=hint,
        link=f"/chats/{chat_id}",
        link_text="Show the chat as it is now",
    )


EXCEPTION_HANDLERS: ExceptionHandlersMap = {Exception: answer_error, HTTPException: answer_error}

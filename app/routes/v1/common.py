"""What the API's handlers share: who calls, what they name, and how they are put together."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.di import NamedDependency
from litestar.enums import MediaType
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api.bases import Bases
from app.api.errors import invalid
from app.api.items import PAGE_ITEMS, page_of
from app.api.keys import Caller, caller_of
from app.api.requests import ApiRequest
from app.services import UseServices
from sessions.records import ApiConversation, ApiResponse

UseCaller = NamedDependency[Caller]
UseConversation = NamedDependency[ApiConversation]
UseResponse = NamedDependency[ApiResponse]
BODY_BYTES = 8 << 20


async def provide_caller(request: ApiRequest, services: UseServices) -> Caller:
    return await caller_of(request, services.repository)


async def provide_conversation(
    services: UseServices, caller: UseCaller, conversation_id: FromPath[str]
) -> ApiConversation:
    """The conversation that the path names. Raises ApiError."""
    bases = Bases(services.repository)
    return await bases.conversation(caller, conversation_id, "conversation_id")


async def provide_response(
    services: UseServices, caller: UseCaller, response_id: FromPath[str]
) -> ApiResponse:
    """The response that the path names. Raises ApiError."""
    return await Bases(services.repository).response(caller, response_id, "response_id")


def json_answer(body: Any) -> ASGIResponse:
    """A response with this body as JSON."""
    return ASGIResponse(body=msgspec.json.encode(body), media_type=MediaType.JSON)


def json_page(
    items: list[dict[str, Any]], limit: str | None, after: str | None, order: str | None
) -> ASGIResponse:
    """A page of a list, by the parameters of the query. Raises ApiError."""
    if limit is not None and not (limit.isascii() and limit.isdigit() and len(limit) < 4):
        raise invalid("limit", "'limit' can be from 1 to 100.")
    count = PAGE_ITEMS if limit is None else int(limit)
    if not 1 <= count <= 100:
        raise invalid("limit", "'limit' can be from 1 to 100.")
    if order not in (None, "asc", "desc"):
        raise invalid("order", "'order' can be 'asc' or 'desc'.")
    return json_answer(page_of(items, limit=count, after=after, descending=order != "asc"))


GONE = 499  # nobody reads it: the client closed its connection


def nobody_there() -> ASGIResponse:
    return ASGIResponse(status_code=GONE, media_type=MediaType.JSON)

"""Responses: answers that the server keeps, and goes on from."""

from __future__ import annotations

import asyncio

from litestar import delete, get, post
from litestar.params import FromPath, FromQuery
from litestar.response.base import ASGIResponse

from app.api.bodies import read_body
from app.api.conversations import Deleted
from app.api.errors import invalid, not_found
from app.api.items import PAGE_ITEMS, key_of, message_json, page_of
from app.api.requests import ApiRequest
from app.api.responses import ResponseJob, ResponseRequest
from app.api.sse import ApiStream, ClientGone, while_connected
from app.api.stored import StoredChats
from app.routes.v1.common import UseCaller, json_answer, nobody_there
from app.services import UseServices, received_at
from sessions.queries.ids import new_id


@post("/responses", status_code=200)
async def create_response(
    request: ApiRequest, services: UseServices, caller: UseCaller
) -> ASGIResponse:
    """Answer an input, as a whole or as a stream."""
    body = await read_body(request, ResponseRequest)
    # In a thread: checking a large schema takes a while.
    job = await asyncio.to_thread(ResponseJob, services.api, body, new_id(), received_at(request))
    generation, item_id = await StoredChats(services.api).start(caller, job)
    if body.stream:
        return ApiStream(job.stream(generation, item_id), generation)
    try:
        await while_connected(request, generation.wait())
    except ClientGone:
        return nobody_there()
    finally:
        await generation.cancel()
    return json_answer(job.finished(generation, item_id))


@get("/responses/{response_id:str}")
async def get_response(
    services: UseServices, caller: UseCaller, response_id: FromPath[str]
) -> ASGIResponse:
    """A response that was stored."""
    stored = StoredChats(services.api)
    found = await stored.response(caller, response_id, "response_id")
    return json_answer(await stored.stored_json(found))


@delete("/responses/{response_id:str}", status_code=200)
async def delete_response(
    services: UseServices, caller: UseCaller, response_id: FromPath[str]
) -> ASGIResponse:
    """Delete a response; its messages go with the last response of their chat."""
    key = key_of(response_id, "resp_", "response", "response_id")
    if not await services.repository.delete_response(caller.user_id, key):
        raise not_found("response", response_id, "response_id")
    return json_answer(Deleted(id=response_id, object="response"))


@get("/responses/{response_id:str}/input_items")
async def list_inputs(
    services: UseServices,
    caller: UseCaller,
    response_id: FromPath[str],
    limit: FromQuery[str | None] = None,
    after: FromQuery[str | None] = None,
    order: FromQuery[str | None] = None,
) -> ASGIResponse:
    """What came with a response's request."""
    stored = StoredChats(services.api)
    found = await stored.response(caller, response_id, "response_id")
    items = [message_json(one) for one in await stored.inputs(found)]
    count, descending = page_options(limit, order)
    return json_answer(page_of(items, limit=count, after=after, descending=descending))


def page_options(limit: str | None, order: str | None) -> tuple[int, bool]:
    """How many items, and whether the latest come first. Raises ApiError."""
    if limit is not None and not (limit.isascii() and limit.isdigit() and len(limit) < 4):
        raise invalid("limit", "'limit' can be from 1 to 100.")
    count = PAGE_ITEMS if limit is None else int(limit)
    if not 1 <= count <= 100:
        raise invalid("limit", "'limit' can be from 1 to 100.")
    if order not in (None, "asc", "desc"):
        raise invalid("order", "'order' can be 'asc' or 'desc'.")
    return count, order != "asc"


HANDLERS = [create_response, get_response, delete_response, list_inputs]

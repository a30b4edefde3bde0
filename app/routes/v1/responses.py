"""Responses: answers that the server keeps, and goes on from."""

from __future__ import annotations

import asyncio

from litestar import delete, get, post
from litestar.params import FromQuery
from litestar.response.base import ASGIResponse

from app.api.bases import Bases
from app.api.bodies import read_body
from app.api.conversations import Deleted
from app.api.errors import not_found
from app.api.items import message_json
from app.api.requests import ApiRequest
from app.api.response_shapes import ResponseRequest
from app.api.responses import ResponseJob
from app.api.sse import ApiStream, ClientGone, while_connected
from app.api.stored import StoredChats
from app.routes.v1.common import (
    UseCaller,
    UseResponse,
    json_answer,
    json_page,
    nobody_there,
)
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
    services: UseServices, caller: UseCaller, stored: UseResponse
) -> ASGIResponse:
    """A response that was stored."""
    return json_answer(await StoredChats(services.api).stored_json(stored))


@delete("/responses/{response_id:str}", status_code=200)
async def delete_response(
    services: UseServices, caller: UseCaller, stored: UseResponse
) -> ASGIResponse:
    """Delete a response; its messages go with the last response of their chat."""
    name = f"resp_{stored.id}"
    if not await services.repository.delete_response(caller.user_id, stored.id):
        raise not_found("response", name, "response_id")
    return json_answer(Deleted(id=name, object="response"))


@get("/responses/{response_id:str}/input_items")
async def list_inputs(
    services: UseServices,
    caller: UseCaller,
    stored: UseResponse,
    limit: FromQuery[str | None] = None,
    after: FromQuery[str | None] = None,
    order: FromQuery[str | None] = None,
) -> ASGIResponse:
    """What came with a response's request."""
    items = await Bases(services.repository).inputs(stored)
    return json_page([message_json(one) for one in items], limit, after, order)


HANDLERS = [create_response, get_response, delete_response, list_inputs]

"""Stateless calls: chat completions, and what belongs to them."""

from __future__ import annotations

import asyncio

from litestar import post
from litestar.response.base import ASGIResponse

from app.api.bodies import read_body
from app.api.chat_completions import ChatJob
from app.api.chat_shapes import ChatCompletionRequest
from app.api.requests import ApiRequest
from app.api.sse import ApiStream, ClientGone, while_connected
from app.routes.v1.common import UseCaller, json_answer, nobody_there
from app.services import UseServices, received_at


@post("/chat/completions", status_code=200)
async def chat_completions(
    request: ApiRequest, services: UseServices, caller: UseCaller
) -> ASGIResponse:
    """Answer a chat, as a whole or as a stream."""
    body = await read_body(request, ChatCompletionRequest)
    # In a thread: checking a large schema takes a while.
    job = await asyncio.to_thread(ChatJob, services.api, body, received_at(request))
    prompt = await job.prompt()
    generation = await job.start(caller, prompt)
    if body.stream:
        return ApiStream(job.stream(generation), generation)
    try:
        await while_connected(request, generation.wait())
    except ClientGone:
        return nobody_there()
    finally:
        await generation.cancel()
    return json_answer(job.completion(generation))


HANDLERS = [chat_completions]

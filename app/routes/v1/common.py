"""What the API's handlers share: who calls, and how they are put together."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.di import NamedDependency
from litestar.enums import MediaType
from litestar.response.base import ASGIResponse

from app.api.keys import Caller, caller_of
from app.api.requests import ApiRequest
from app.services import UseServices

UseCaller = NamedDependency[Caller]
BODY_BYTES = 8 << 20


async def provide_caller(request: ApiRequest, services: UseServices) -> Caller:
    return await caller_of(request, services.repository)


def json_answer(body: Any) -> ASGIResponse:
    """A response with this body as JSON."""
    return ASGIResponse(body=msgspec.json.encode(body), media_type=MediaType.JSON)


GONE = 499  # nobody reads it: the client closed its connection


def nobody_there() -> ASGIResponse:
    return ASGIResponse(status_code=GONE, media_type=MediaType.JSON)

"""The API's own description, for programs and their makers; it needs no key."""

from __future__ import annotations

from litestar import get
from litestar.response.base import ASGIResponse

from app.api.openapi import openapi_document
from app.routes.v1.common import json_answer
from app.services import UseServices


@get("/v1/openapi.json")
async def describe(services: UseServices) -> ASGIResponse:
    """The OpenAPI document."""
    return json_answer(openapi_document(services.api.model_name))

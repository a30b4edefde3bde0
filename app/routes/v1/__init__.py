"""The API under /v1: bearer keys, never cookies; errors in OpenAI's shape."""

from __future__ import annotations

from litestar import Router
from litestar.di import Provide
from litestar.exceptions import HTTPException

from app.api.errors import answer_api_error
from app.routes.v1 import chat, conversations, models, responses
from app.routes.v1.common import (
    BODY_BYTES,
    provide_caller,
    provide_conversation,
    provide_response,
)

API_ROUTER = Router(
    path="/v1",
    route_handlers=[
        *models.HANDLERS,
        *chat.HANDLERS,
        *responses.HANDLERS,
        *conversations.HANDLERS,
    ],
    dependencies={
        "caller": Provide(provide_caller),
        "conversation": Provide(provide_conversation),
        "stored": Provide(provide_response),
    },
    exception_handlers={Exception: answer_api_error, HTTPException: answer_api_error},
    request_max_body_size=BODY_BYTES,
)

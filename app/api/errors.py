"""What goes wrong in the API, in the shape that clients of OpenAI's API read."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import Response
from litestar.enums import MediaType
from litestar.exceptions import HTTPException

from app.api.requests import ApiRequest
from app.faults import ServerDraining
from engine.errors import ContextOverflow, EngineUnavailable, QueueFull
from engine.messages import Failed
from sessions.errors import DatabaseClosed, NotStored, TurnRunning

logger = logging.getLogger(__name__)

ENGINE_RETRY_S = 5
CONFLICT_RETRY_S = 1
_WORDS = {
    404: "There is no such URL in this API.",
    405: "This URL cannot be asked with that method.",
    413: "The request's body is larger than what the server takes.",
}


class ApiError(Exception):
    """One error as a client reads it; `param` names the field that was wrong."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field of the request, `code` tells programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer of this API with a status from 400 on."""

    error: ErrorBody


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field that has a value which cannot be used."""
    return ApiError(message, param=param, code=code)


def not_found(what: str, key: str, param: str) -> ApiError:
    """Something that is not there, or another user's: the two look the same."""
    return ApiError(f"There is no {what} '{key}'.", status=404, param=param, code="not_found")


def no_such_model(name: str) -> ApiError:
    return ApiError(
        f"The model '{name}' does not exist here.",
        status=404,
        param="model",
        code="model_not_found",
    )


def context_exceeded(num_tokens: int, limit: int, param: str) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {limit} tokens, the answer included. "
        f"However, your input resulted in {num_tokens} tokens.",
        param=param,
        code="context_length_exceeded",
    )


def busy(message: str, retry_after_s: int, *, status: int = 429) -> ApiError:
    return ApiError(
        message,
        status=status,
        kind="rate_limit_error" if status == 429 else "server_error",
        code="rate_limit_exceeded" if status == 429 else "server_busy",
        retry_after_s=retry_after_s,
    )


def error_of_failure(failed: Failed, param: str) -> ApiError:
    """From the engine's last word on a request."""
    match failed.kind:
        case "context_overflow":
            return ApiError(failed.reason, param=param, code="context_length_exceeded")
        case "queue_full":
            return busy("The server is busy.", ENGINE_RETRY_S)
        case "engine_died":
            return busy("The engine is being started again.", ENGINE_RETRY_S, status=503)
        case "internal":
            return ApiError(failed.reason, status=500, kind="server_error", code="server_error")


def api_error_of(error: Exception) -> ApiError:
    """Any error as one of the API."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return busy("The server is busy.", error.retry_after_s)
        case ServerDraining():
            return busy("The server is being restarted.", error.retry_after_s, status=503)
        case EngineUnavailable():
            return busy("The engine is being started again.", ENGINE_RETRY_S, status=503)
        case NotStored() | DatabaseClosed():
            return busy("The server cannot store anything now.", ENGINE_RETRY_S, status=503)
        case ContextOverflow():
            return context_exceeded(error.num_tokens, error.limit, "messages")
        case TurnRunning():
            return ApiError(
                "Another answer of this conversation is being written.",
                status=409,
                code="conversation_locked",
                retry_after_s=CONFLICT_RETRY_S,
            )
        case HTTPException():
            return ApiError(
                _WORDS.get(error.status_code) or error.detail or "The request was refused.",
                status=error.status_code,
                code={404: "unknown_url", 413: "request_too_large"}.get(error.status_code),
            )
        case _:
            return ApiError(
                "The server failed to do this; its log says why.",
                status=500,
                kind="server_error",
                code="server_error",
            )


def error_json(error: ApiError) -> dict[str, Any]:
    """The body of an error, also for an event in a stream that has begun."""
    body = ErrorBody(message=str(error), type=error.kind, param=error.param, code=error.code)
    built: dict[str, Any] = msgspec.to_builtins(ErrorAnswer(error=body))
    return built


def answer_api_error(request: ApiRequest, error: Exception) -> Response[dict[str, Any]]:
    """The response for an error under /v1."""
    known = api_error_of(error)
    if known.status >= 500 and not isinstance(error, ApiError | EngineUnavailable):
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    headers: dict[str, str] = {}
    if known.retry_after_s is not None:
        headers["Retry-After"] = str(known.retry_after_s)
    if known.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.status_code == 405:
        headers["Allow"] = (error.headers or {}).get("allow", "")
    return Response(
        error_json(known), status_code=known.status, headers=headers, media_type=MediaType.JSON
    )

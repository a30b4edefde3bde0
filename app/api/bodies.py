"""Request bodies: JSON of a known shape, or an error that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from app.api.errors import ApiError
from app.api.requests import ApiRequest

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r" - at (?:`?key`? in )?`\$\.?(.*)`$", re.DOTALL)
_FIELD = re.compile(
    r"Object (?P<how>contains unknown|missing required) field `(?P<name>.*?)`", re.DOTALL
)
_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_body(request: ApiRequest, kind: type[T], *, optional: bool = False) -> T:
    """The request's body as this struct. Raises ApiError, which names the field at fault.

    An `optional` body may be missing altogether.
    """
    body = await request.body()
    if not body and optional:
        body = b"{}"
    elif request.content_type[0] != "application/json":
        raise ApiError(
            "The body must be JSON, sent as application/json.",
            status=415,
            code="unsupported_media_type",
        )
    return decode(body, kind)


def decode(body: bytes, kind: type[T]) -> T:
    """Raises ApiError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except RecursionError as error:
        raise ApiError("The body's JSON is nested too deeply.", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _syntax_error(body, str(error)) from error


def _field_error(message: str) -> ApiError:
    at = _AT.search(message)
    path = at[1] if at else ""
    reason = message[: at.start()] if at else message
    field = _FIELD.search(reason)
    if field is None:
        where = f"'{path}'" if path else "the body"
        return ApiError(
            f"Invalid value for {where}: {reason}.", param=path or None, code="invalid_value"
        )
    path = f"{path}.{field['name']}" if path else field["name"]
    if field["how"] == "contains unknown":
        return ApiError(f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter")
    return ApiError(
        f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter"
    )


def _syntax_error(body: bytes, reason: str) -> ApiError:
    """JSON allows lone surrogates as escapes; texts do not: the field that has one is named."""
    try:
        loose = json.loads(body)
    except (ValueError, RecursionError):
        loose = None
    for path, text in _texts(loose, ""):
        if _SURROGATE.search(text):
            return ApiError(
                f"'{path}' holds a lone surrogate, which is no valid Unicode.",
                param=path or None,
                code="invalid_value",
            )
    return ApiError(f"The body is no valid JSON: {reason}.", code="invalid_json")


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    match value:
        case str():
            yield path, value
        case dict():
            for key, inner in value.items():
                below = f"{path}.{key}" if path else key
                yield below.encode("utf-8", "replace").decode(), key
                yield from _texts(inner, below)
        case list():
            for number, inner in enumerate(value):
                yield from _texts(inner, f"{path}[{number}]")

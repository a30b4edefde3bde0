"""What a request may ask of its answers, checked and turned into what the engine takes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.api.errors import ApiError, invalid
from engine.messages import SamplingParams
from engine.model.json_grammar import json_grammar

MAX_SCHEMA_CHARS = 32_000  # compiling the worst of that size takes half a second
MAX_ANSWERS = 8
MAX_STOPS = 4
MAX_TOKENS = 1 << 24

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenLimit = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonFormat | JsonSchemaFormat


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """All that decides how answers are sampled; `max_tokens` is cut to the context later."""

    sampling: SamplingParams
    answers: int = 1
    top_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str = ""


def sampling_params(
    *,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
) -> SamplingParams:
    """With the defaults of OpenAI's API, not those of an assistant."""
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else max(top_p, 1e-6),  # 0 leaves the likeliest token
        presence_penalty=presence_penalty or 0.0,
        frequency_penalty=frequency_penalty or 0.0,
        seed=secrets.randbits(31) if seed is None else seed,
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
    )


def grammar_of(schema: Mapping[str, Any] | None, param: str) -> str:
    """The grammar of a JSON schema, of any JSON object for None. Raises ApiError."""
    if schema is None:
        return json_grammar({"type": "object"})
    try:
        size = len(json.dumps(schema))
        if size > MAX_SCHEMA_CHARS:
            raise ValueError(f"it has {size} characters; up to {MAX_SCHEMA_CHARS} can be sent")
        return json_grammar(schema)
    except RecursionError:
        raise invalid(param, f"Invalid schema for '{param}': it is nested too deeply.") from None
    except ValueError as error:
        raise invalid(param, f"Invalid schema for '{param}': {error}.", "invalid_schema") from None


def format_grammar(chosen: ResponseFormat | None) -> str:
    """The grammar of chat completions' `response_format`; "" for plain text."""
    match chosen:
        case JsonFormat():
            return grammar_of(None, "response_format")
        case JsonSchemaFormat():
            return grammar_of(chosen.json_schema.schema, "response_format.json_schema.schema")
        case _:
            return ""


def check_bias(bias: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    """Raises ApiError for an id that no token has."""
    for token_id in bias:
        if not 0 <= token_id < vocab_size:
            raise invalid("logit_bias", f"There is no token {token_id}: ids end at {vocab_size}.")
    return dict(bias)


def unsupported(param: str, why: str = "this model does not support it") -> ApiError:
    return ApiError(
        f"Unsupported parameter: '{param}': {why}.", param=param, code="unsupported_parameter"
    )


def refuse(request: msgspec.Struct, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError for a known parameter with a value that is more than we do.

    `allowed` maps such parameters to the values that change nothing; null always is one.
    """
    for name, values in allowed.items():
        value = getattr(request, name)
        if value is not None and value not in values:
            raise unsupported(name)


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]

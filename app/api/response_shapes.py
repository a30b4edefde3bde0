"""The request for a response, as clients send it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.api.items import Input
from app.api.options import (
    JsonFormat,
    Metadata,
    ServiceTier,
    Temperature,
    TextFormat,
    TokenLimit,
    TopLogprobs,
    TopP,
)


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | JsonFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """This server's models do not reason apart: only what asks for nothing is taken."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class ConversationRef(msgspec.Struct, forbid_unknown_fields=True):
    id: str


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is to be answered, and what it goes on from."""

    input: Input
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_output_tokens: TokenLimit | None = None
    text: TextConfig | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Metadata | None = None
    user: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    # Hints that change no answer.
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    # Known, and refused unless they ask for nothing: see `_NO_EFFECT`.
    background: bool | None = None
    context_management: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    truncation: Literal["auto", "disabled"] | None = None

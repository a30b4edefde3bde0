"""Chat completions as they are sent: the request, and the whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.api.messages import MAX_MESSAGES, ChatMessage, Tool, ToolCall
from app.api.options import (
    MAX_ANSWERS,
    Bias,
    Metadata,
    Penalty,
    ResponseFormat,
    Seed,
    ServiceTier,
    Stop,
    Temperature,
    TokenLimit,
    TopLogprobs,
    TopP,
)
from app.api.usage import Timings, Usage
from engine.messages import TokenLogprobs
from engine.model.tokenizer import ChatTokenizer

FinishReason = Literal["stop", "length", "tool_calls"]
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatCompletionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A chat and how it is to be answered. Unknown fields are errors, as in OpenAI's API."""

    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    logit_bias: dict[int, Bias] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    # Hints that change no answer.
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    # Known, and refused unless they ask for nothing.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class Choice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, kw_only=True):
    """All answers of one request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None
    system_fingerprint: str
    timings: Timings | None  # an addition to OpenAI's API


def token_logprobs(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], scores: Sequence[TokenLogprobs]
) -> list[TokenLogprob]:
    """The engine's figures with the tokens' texts."""
    return [
        TokenLogprob(
            token=tokenizer.name_of(token_id),
            logprob=max(LEAST_LOGPROB, score.logprob),
            bytes=list(tokenizer.bytes_of(token_id)),
            top_logprobs=[
                TopLogprob(
                    token=tokenizer.name_of(other),
                    logprob=max(LEAST_LOGPROB, logprob),
                    bytes=list(tokenizer.bytes_of(other)),
                )
                for other, logprob in score.top
            ],
        )
        for token_id, score in zip(token_ids, scores, strict=True)
    ]

"""Chat completions: the request, what it is turned into, and its answers in OpenAI's shapes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.api.errors import error_json, invalid
from app.api.generation import Answer, Generation
from app.api.keys import Caller
from app.api.messages import MAX_MESSAGES, ChatMessage, Tool, ToolCall, no_tools, prompt_messages
from app.api.options import (
    MAX_ANSWERS,
    AnswerOptions,
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
    check_bias,
    format_grammar,
    refuse,
    sampling_params,
    unsupported,
)
from app.api.service import Api
from app.api.sse import DONE, HEARTBEAT, event
from app.api.tool_calls import ToolCallReader
from app.api.usage import Timings, Usage, timings_of, usage_of
from engine.messages import TokenLogprobs
from engine.model.prompt import PromptIds
from engine.model.tokenizer import ChatTokenizer
from sessions.queries.ids import new_id

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
# Parameters of OpenAI's API with the values that ask for nothing more than we do.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


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
    # Known, and refused unless they ask for nothing: see `_NO_EFFECT`.
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
    finish_reason: Literal["stop", "length", "tool_calls"]


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


class ChatJob:
    """One checked request: its prompt, its options, and how its answers are put."""

    def __init__(self, api: Api, request: ChatCompletionRequest, received_at: float) -> None:
        """Raises ApiError."""
        api.check_model(request.model)
        refuse(request, _NO_EFFECT)
        self._api = api
        self._request = request
        self._received_at = received_at
        self._head = {"id": f"chatcmpl-{new_id()}", "created": int(time.time())}
        if request.tools and not api.prompts.takes_tools:
            raise no_tools("tools")
        if request.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "only 'auto' and 'none' are")
        self._tools = None if request.tool_choice == "none" else request.tools or None
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
        if request.stream_options is not None and not request.stream:
            raise invalid("stream_options", "'stream_options' is for streams only.")
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise invalid("max_tokens", "Give 'max_completion_tokens' or 'max_tokens', not both.")
        self._options = AnswerOptions(
            sampling=sampling_params(
                temperature=request.temperature,
                top_p=request.top_p,
                max_tokens=request.max_completion_tokens or request.max_tokens,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                seed=request.seed,
                stop=request.stop,
            ),
            answers=request.n or 1,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            logit_bias=check_bias(request.logit_bias or {}, api.engine.info.vocab_size),
            grammar=format_grammar(request.response_format),
        )

    async def prompt(self) -> PromptIds:
        """Raises ApiError."""
        messages = prompt_messages(
            self._request.messages,
            max_chars=self._api.settings.max_message_chars,
            takes_tools=self._api.prompts.takes_tools,
        )
        tools = None if self._tools is None else [_plain(tool) for tool in self._tools]
        return await self._api.build(messages, "messages", tools)

    def start(self, caller: Caller, prompt: PromptIds) -> Generation:
        """Raises ApiError, EngineUnavailable."""
        stored = self._request.store is not False
        return self._api.start_stateless(
            caller, prompt, self._options, stored=stored, param="messages"
        )

    def completion(self, generation: Generation) -> ChatCompletion:
        """All answers, once they have ended."""
        choices = [self._choice(n, answer) for n, answer in enumerate(generation.answers)]
        return ChatCompletion(
            **self._head,  # type: ignore[arg-type]  # id and created
            model=self._api.model_name,
            choices=choices,
            usage=usage_of(generation.answers),
            system_fingerprint=self._api.fingerprint,
            timings=timings_of(generation, self._received_at),
        )

    def _choice(self, index: int, answer: Answer) -> Choice:
        content: str | None = answer.text
        message = AnswerMessage(content=content)
        finish = FINISH[answer.finish or "cancelled"]
        if self._tools is not None:
            reader = ToolCallReader()
            content = reader.push(answer.text) + reader.flush()
            message.content = content or None
            if reader.calls:
                message.tool_calls = reader.calls
                finish = "tool_calls"
        logprobs = None
        if self._options.top_logprobs is not None:
            told = token_logprobs(self._api.tokenizer, answer.token_ids, answer.logprobs)
            logprobs = ChoiceLogprobs(content=told)
        return Choice(
            index=index,
            message=message,
            logprobs=logprobs,
            finish_reason=finish,  # type: ignore[arg-type]  # one of FINISH
        )

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answers as server-sent events."""
        readers = [ToolCallReader() for _ in generation.answers]
        yield HEARTBEAT
        for index in range(len(generation.answers)):
            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
        async for found in generation.events():
            if found is None:
                yield HEARTBEAT
                continue
            index, delta = found
            text = delta.text
            if self._tools is not None:
                text = readers[index].push(text)
            logprobs = None
            if self._options.top_logprobs is not None and delta.token_ids:
                told = token_logprobs(self._api.tokenizer, delta.token_ids, delta.logprobs or [])
                logprobs = ChoiceLogprobs(content=told)
            if text or logprobs is not None:
                yield self._chunk(index, {"content": text}, logprobs=logprobs)
        if generation.error is not None:
            yield event(error_json(generation.error))
            return
        for index, answer in enumerate(generation.answers):
            for chunk in self._last_chunks(index, answer, readers[index]):
                yield chunk
        if self._wants_usage:
            yield event(
                {
                    **self._chunk_head,
                    "choices": [],
                    "usage": usage_of(generation.answers),
                    "timings": timings_of(generation, self._received_at),
                }
            )
        yield DONE

    def _last_chunks(self, index: int, answer: Answer, reader: ToolCallReader) -> list[bytes]:
        chunks = []
        finish = FINISH[answer.finish or "cancelled"]
        if self._tools is not None:
            if rest := reader.flush():
                chunks.append(self._chunk(index, {"content": rest}))
            if reader.calls:
                calls = [{"index": n, **_plain(call)} for n, call in enumerate(reader.calls)]
                chunks.append(self._chunk(index, {"tool_calls": calls}))
                finish = "tool_calls"
        chunks.append(self._chunk(index, {}, finish=finish))
        return chunks

    @property
    def _wants_usage(self) -> bool:
        options = self._request.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion.chunk",
            "model": self._api.model_name,
            "system_fingerprint": self._api.fingerprint,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: ChoiceLogprobs | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._wants_usage:
            chunk["usage"] = None
        return event(chunk)


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


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(value)
    return built

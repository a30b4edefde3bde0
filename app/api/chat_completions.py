"""Chat completions: the request, what it is turned into, and its answers in OpenAI's shapes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from app.api.chat_shapes import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionRequest,
    Choice,
    ChoiceLogprobs,
    FinishReason,
    token_logprobs,
)
from app.api.errors import error_json, invalid
from app.api.generation import Answer, Generation
from app.api.keys import Caller
from app.api.messages import no_tools, prompt_messages
from app.api.options import (
    AnswerOptions,
    check_bias,
    format_grammar,
    refuse,
    sampling_params,
    unsupported,
)
from app.api.service import Api
from app.api.sse import DONE, HEARTBEAT, event
from app.api.tool_calls import ToolCallReader
from app.api.usage import timings_of, usage_of
from engine.model.prompt import PromptIds
from sessions.queries.ids import new_id

FINISH: dict[str, FinishReason] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "stop",
}
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


class ChatJob:
    """One checked request: its prompt, its options, and how its answers are put."""

    def __init__(self, api: Api, request: ChatCompletionRequest, received_at: float) -> None:
        """Raises ApiError."""
        api.check_model(request.model)
        refuse(request, _NO_EFFECT)
        self._api = api
        self._request = request
        self._received_at = received_at
        self._head: dict[str, Any] = {"id": f"chatcmpl-{new_id()}", "created": int(time.time())}
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

    async def start(self, caller: Caller, prompt: PromptIds) -> Generation:
        """Raises ApiError, EngineUnavailable."""
        stored = self._request.store is not False
        return await self._api.start_stateless(
            caller, prompt, self._options, stored=stored, param="messages"
        )

    def completion(self, generation: Generation) -> ChatCompletion:
        """All answers, once they have ended."""
        choices = [self._choice(n, answer) for n, answer in enumerate(generation.answers)]
        return ChatCompletion(
            **self._head,
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
            finish_reason=finish,
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


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(value)
    return built

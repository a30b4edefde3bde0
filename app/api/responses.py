"""Responses: the request, and the object and events that clients read."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from app.api.chat_shapes import token_logprobs
from app.api.errors import ApiError, error_json
from app.api.generation import Answer, Generation
from app.api.items import item_json, message_json, output_text
from app.api.messages import no_tools
from app.api.options import (
    AnswerOptions,
    JsonFormat,
    TextFormat,
    grammar_of,
    refuse,
    sampling_params,
    unsupported,
)
from app.api.response_shapes import ResponseRequest, SchemaFormat
from app.api.service import Api
from app.api.sse import HEARTBEAT, event
from app.api.usage import partial_usage, response_usage_of, timings_of
from engine.messages import FinishReason
from sessions.records import ApiItem, Message

LOGPROBS = "message.output_text.logprobs"
STATUS: Mapping[FinishReason | None, str] = {
    "eos": "completed",
    "stop": "completed",
    "length": "incomplete",
    "cancelled": "cancelled",
    None: "failed",
}
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "tool_choice": ("auto", "none"),
}


class ResponseJob:
    """One checked request and how its answer is put."""

    def __init__(
        self, api: Api, request: ResponseRequest, response_id: str, received_at: float
    ) -> None:
        """Raises ApiError."""
        if request.model is not None:
            api.check_model(request.model)
        refuse(request, _NO_EFFECT)
        if request.tools:
            raise no_tools("tools")
        self.request = request
        self.response_id = response_id
        self.received_at = received_at
        self._api = api
        self._logprobs = LOGPROBS in (request.include or [])
        if request.top_logprobs and not self._logprobs:
            raise unsupported("top_logprobs", f"it needs '{LOGPROBS}' in 'include'")
        self.options = AnswerOptions(
            sampling=sampling_params(
                temperature=request.temperature,
                top_p=request.top_p,
                max_tokens=request.max_output_tokens,
            ),
            top_logprobs=(request.top_logprobs or 0) if self._logprobs else None,
            grammar=self._grammar(),
        )
        self.base: dict[str, Any] = self._base()

    def _grammar(self) -> str:
        chosen = self.request.text.format if self.request.text is not None else None
        match chosen:
            case JsonFormat():
                return grammar_of(None, "text.format")
            case SchemaFormat():
                return grammar_of(chosen.schema, "text.format.schema")
            case _:
                return ""

    def _base(self) -> dict[str, Any]:
        """All of the response that does not change while it is made."""
        request = self.request
        text = request.text
        chosen = TextFormat() if text is None or text.format is None else text.format
        return {
            "id": f"resp_{self.response_id}",
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._api.model_name,
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "conversation": None,
            "reasoning": {"effort": None, "summary": None},
            "store": request.store is not False,
            "temperature": self.options.sampling.temperature,
            "text": {"format": msgspec.to_builtins(chosen), "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": self.options.top_logprobs or 0,
            "top_p": self.options.sampling.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def in_progress(self) -> dict[str, Any]:
        return response_json(self.base, status="in_progress")

    def finished(self, generation: Generation, item_id: str) -> dict[str, Any]:
        """The response once its answer has ended, well or not."""
        [answer] = generation.answers
        status = STATUS[answer.finish]
        if status == "cancelled" and not generation.cancelled:
            status = "failed"
        if generation.cancelled and answer.finish is None:
            status = "cancelled"
        begun = bool(answer.token_ids) or answer.finish is not None
        usage = response_usage_of(answer)
        if usage is None and begun:
            usage = partial_usage(generation.prompt_tokens, len(answer.token_ids))
        return response_json(
            self.base,
            status=status,
            output=[self._output(answer, item_id, status)] if begun else [],
            error=generation.error if status == "failed" else None,
            usage=msgspec.to_builtins(usage),
            timings=msgspec.to_builtins(timings_of(generation, self.received_at)),
        )

    def _output(self, answer: Answer, item_id: str, status: str) -> dict[str, Any]:
        item = item_json(
            ApiItem(id=item_id, role="assistant", text=answer.text),
            "completed" if status == "completed" else "incomplete",
        )
        item["content"] = [output_text(answer.text, self._scores(answer))]
        return item

    def _scores(self, answer: Answer) -> list[Any]:
        if not self._logprobs:
            return []
        told = token_logprobs(self._api.tokenizer, answer.token_ids, answer.logprobs)
        scores: list[Any] = msgspec.to_builtins(told)
        return scores

    async def stream(self, generation: Generation, item_id: str) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        number = 0
        place = {"item_id": f"msg_{item_id}", "output_index": 0, "content_index": 0}

        def told(kind: str, **fields: Any) -> bytes:
            nonlocal number
            data = {"type": kind, "sequence_number": number, **fields}
            number += 1
            return event(data, kind)

        yield HEARTBEAT
        yield told("response.created", response=self.in_progress())
        yield told("response.in_progress", response=self.in_progress())
        begun = item_json(ApiItem(id=item_id, role="assistant", text=""), "in_progress")
        begun["content"] = []
        yield told("response.output_item.added", output_index=0, item=begun)
        yield told("response.content_part.added", **place, part=output_text(""))
        async for found in generation.events():
            if found is None:
                yield HEARTBEAT
                continue
            _, delta = found
            scores: list[Any] = []
            if self._logprobs and delta.logprobs:
                scores = token_logprobs(self._api.tokenizer, delta.token_ids, delta.logprobs)
            if delta.text or scores:
                yield told("response.output_text.delta", **place, delta=delta.text, logprobs=scores)
        response = self.finished(generation, item_id)
        [answer] = generation.answers
        if response["output"]:
            [item] = response["output"]
            [part] = item["content"]
            yield told(
                "response.output_text.done",
                **place,
                text=answer.text,
                logprobs=part["logprobs"],
            )
            yield told("response.content_part.done", **place, part=part)
            yield told("response.output_item.done", output_index=0, item=item)
        if generation.error is not None:
            yield told("error", **error_json(generation.error)["error"])
        status = response["status"]
        kind = status if status in ("completed", "incomplete") else "failed"
        yield told(f"response.{kind}", response=response)


def cut_off_json(body: Mapping[str, Any], answer: Message, read: int) -> dict[str, Any]:
    """A response whose end the server did not live to store, with what there is of its answer.

    `read` counts the tokens of its prompt.
    """
    base = {name: value for name, value in body.items() if name != "status"}
    output = [message_json(answer)] if answer.token_ids else []
    return response_json(
        base,
        status="failed",
        output=output,
        error=ApiError(answer.error or "The answer was cut off."),
        usage=msgspec.to_builtins(partial_usage(read, len(answer.token_ids))),
    )


def response_json(
    base: Mapping[str, Any],
    *,
    status: str,
    output: list[dict[str, Any]] | None = None,
    error: ApiError | None = None,
    usage: Any = None,
    timings: Any = None,
) -> dict[str, Any]:
    """The whole object."""
    told = None
    if error is not None:
        told = {"code": "server_error", "message": str(error)}
    return {
        **base,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "error": told,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output or [],
        "usage": usage,
        "timings": timings,
    }

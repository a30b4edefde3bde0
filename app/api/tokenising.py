"""Counting the tokens of a text or chat, and having a chat's state brought back beforehand."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from app.api.errors import ApiError, invalid
from app.api.keys import Caller
from app.api.messages import MAX_MESSAGES, ChatMessage, check_text, prompt_messages
from app.api.service import Api

Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a text as it is, or a chat as chat completions would give it to the model."""

    model: str
    prompt: str | None = None
    messages: Messages | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["tokens"] = "tokens"
    count: int
    max_model_len: int
    tokens: list[int]


class WarmRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the three: a chat that will be sent again, or what a response will go on from."""

    model: str
    messages: Messages | None = None
    previous_response_id: str | None = None
    conversation: str | None = None


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """`known_tokens` of the chat are brought back, if they are not in memory already."""

    object: Literal["warm"] = "warm"
    known_tokens: int


def one_of(request: msgspec.Struct, *names: str) -> str:
    """The only one of these fields that is given. Raises ApiError."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        wanted = ", ".join(f"'{name}'" for name in names)
        raise ApiError(
            f"Give exactly one of {wanted}.",
            param=names[0],
            code="missing_required_parameter" if not given else "invalid_value",
        )
    return given[0]


async def tokenize(api: Api, request: TokenizeRequest) -> Tokens:
    """Raises ApiError."""
    api.check_model(request.model)
    max_chars = api.settings.max_message_chars
    if one_of(request, "prompt", "messages") == "prompt":
        text = check_text(request.prompt or "", "prompt", max_chars)
        try:
            ids = await asyncio.to_thread(api.tokenizer.encode_text, text)
        except ValueError as error:
            raise invalid("prompt", f"'prompt' cannot be tokenised: {error}.") from error
    else:
        messages = prompt_messages(
            request.messages or [], max_chars=max_chars, takes_tools=api.prompts.takes_tools
        )
        prompt = await api.build(messages, "messages")
        ids = [*prompt.prefix, *prompt.rest]
    return Tokens(count=len(ids), max_model_len=api.context_limit, tokens=ids)


async def warm_chat(api: Api, caller: Caller, request: WarmRequest) -> Warmed:
    """Bring back what a stateless chat would go on from. Raises ApiError."""
    messages = prompt_messages(
        request.messages or [],
        max_chars=api.settings.max_message_chars,
        takes_tools=api.prompts.takes_tools,
    )
    prompt = await api.build(messages, "messages")
    return Warmed(known_tokens=await api.warm_stateless(caller, prompt))

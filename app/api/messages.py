"""Messages as clients send them, and what of them reaches the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.api.errors import ApiError, invalid
from engine.model.prompt import PromptMessage

MAX_MESSAGES = 2048
MAX_PARTS = 2048


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str


Parts = Annotated[list[TextPart], Meta(min_length=1, max_length=MAX_PARTS)]
AnswerParts = Annotated[list[TextPart | RefusalPart], Meta(min_length=1, max_length=MAX_PARTS)]
Text = str | Parts


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, tag_field="role", kw_only=True, forbid_unknown_fields=True):
    name: str | None = None  # accepted, not shown to the model


class SystemMessage(_Message, tag="system"):
    content: Text


class DeveloperMessage(_Message, tag="developer"):
    content: Text


class UserMessage(_Message, tag="user"):
    content: Text


class AssistantMessage(_Message, tag="assistant"):
    content: str | AnswerParts | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    refusal: str | None = None
    # What answers of this API hold besides, so that they can be sent back as they are.
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(_Message, tag="tool"):
    content: Text
    tool_call_id: str


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


def check_text(text: str, param: str, max_chars: int) -> str:
    """The text as it is; NUL and too many characters are refused by ApiError."""
    if "\0" in text:
        raise invalid(param, f"'{param}' holds U+0000, which no text can have.")
    if len(text) > max_chars:
        raise ApiError(
            f"'{param}' has {len(text)} characters; up to {max_chars} can be sent.",
            param=param,
            code="string_above_max_length",
        )
    return text


def joined(content: str | Sequence[TextPart | RefusalPart]) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def prompt_messages(
    messages: Sequence[ChatMessage], *, max_chars: int, takes_tools: bool
) -> list[PromptMessage]:
    """The messages as the prompt is built of them. Raises ApiError, which names the message."""
    built = []
    for number, message in enumerate(messages):
        at = f"messages[{number}]"
        match message:
            case SystemMessage():
                role = "system"
            case DeveloperMessage():
                role = "developer"
            case UserMessage():
                role = "user"
            case AssistantMessage():
                built.append(_assistant(message, at, max_chars, takes_tools))
                continue
            case ToolMessage():
                if not takes_tools:
                    raise no_tools(f"{at}.role")
                role = "tool"
        text = check_text(joined(message.content), f"{at}.content", max_chars)
        extra = {"tool_call_id": message.tool_call_id} if isinstance(message, ToolMessage) else {}
        built.append(PromptMessage(role, text, extra))
    return built


def no_tools(param: str) -> ApiError:
    return ApiError(
        "This model's chat template has no tools, so the model cannot call any.",
        param=param,
        code="unsupported_parameter",
    )


def _assistant(
    message: AssistantMessage, at: str, max_chars: int, takes_tools: bool
) -> PromptMessage:
    content = message.content if message.content is not None else message.refusal
    calls = message.tool_calls or []
    if content is None and not calls:
        raise ApiError(
            f"'{at}' has neither content nor tool calls.",
            param=f"{at}.content",
            code="missing_required_parameter",
        )
    if calls and not takes_tools:
        raise no_tools(f"{at}.tool_calls")
    text = None
    if content is not None:
        text = check_text(joined(content), f"{at}.content", max_chars)
    if not calls:
        return PromptMessage("assistant", text)
    shown = []
    for number, call in enumerate(calls):
        try:
            arguments = json.loads(call.function.arguments)
        except (ValueError, RecursionError):
            param = f"{at}.tool_calls[{number}].function.arguments"
            raise invalid(param, f"'{param}' is no valid JSON.") from None
        function = {"name": call.function.name, "arguments": arguments}
        shown.append({"id": call.id, "type": "function", "function": function})
    return PromptMessage("assistant", text, {"tool_calls": shown})

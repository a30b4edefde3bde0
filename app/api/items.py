"""Items of responses and conversations: messages as clients send and read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.api.errors import ApiError, not_found
from app.api.messages import MAX_MESSAGES, MAX_PARTS, check_text
from engine.model.prompt import PromptMessage
from sessions.queries.ids import new_id
from sessions.records import ApiItem, Message

MAX_ITEMS = 20  # in one call for a conversation
PAGE_ITEMS = 20
_STATUS = {"complete": "completed", "running": "in_progress"}  # all others are incomplete


class InputText(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str


class PlainText(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class OutputRefusal(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str


Part = InputText | PlainText | OutputText | OutputRefusal
Parts = Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)]


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message; one that this API gave out can be sent back as it is."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


Input = str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]


def items_of(given: str | Sequence[InputItem], param: str, max_chars: int) -> list[ApiItem]:
    """The items with ids of their own. Raises ApiError, which names the item at fault."""
    if isinstance(given, str):
        return [ApiItem(id=new_id(), role="user", text=check_text(given, param, max_chars))]
    made = []
    for number, item in enumerate(given):
        text = check_text(_joined(item.content), f"{param}[{number}].content", max_chars)
        made.append(ApiItem(id=new_id(), role=item.role, text=text))
    return made


def _joined(content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(p.refusal if isinstance(p, OutputRefusal) else p.text for p in content)


def item_of(message: Message) -> ApiItem:
    return ApiItem(id=message.id, role=message.role, text=message.text)


def prompt_message(item: ApiItem) -> PromptMessage:
    return PromptMessage(item.role, item.text)


def output_text(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def item_json(item: ApiItem, status: str = "completed") -> dict[str, Any]:
    """An item as a client reads it."""
    part = {"type": "input_text", "text": item.text}
    if item.role == "assistant":
        part = output_text(item.text)
    return {
        "type": "message",
        "id": f"msg_{item.id}",
        "status": status,
        "role": item.role,
        "content": [part],
    }


def message_json(message: Message) -> dict[str, Any]:
    return item_json(item_of(message), _STATUS.get(message.status, "incomplete"))


def page_of(
    items: Sequence[dict[str, Any]], *, limit: int, after: str | None, descending: bool
) -> dict[str, Any]:
    """One page of a list. Raises ApiError when there is no item `after`."""
    ordered = list(items)[::-1] if descending else list(items)
    start = 0
    if after is not None:
        known = [item["id"] for item in ordered]
        if after not in known:
            raise not_found("item", after, "after")
        start = known.index(after) + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }


def key_of(given: str, prefix: str, what: str, param: str) -> str:
    """The row's id in a public one, such as `resp_...`. Raises ApiError."""
    key = given.removeprefix(prefix)
    if key == given or len(key) != 32 or not set(key) <= set("0123456789abcdef"):
        raise not_found(what, given[:80], param)
    return key


def changed_meanwhile() -> ApiError:
    return ApiError(
        "The conversation was changed by another request meanwhile.",
        status=409,
        code="conversation_locked",
        retry_after_s=1,
    )

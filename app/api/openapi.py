"""The API's description: an OpenAPI 3.1 document, made of the structs that requests are read by."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from app.api.chat_shapes import ChatCompletion, ChatCompletionRequest
from app.api.conversations import (
    Conversation,
    ConversationChange,
    ConversationRequest,
    Deleted,
    NewItems,
)
from app.api.errors import ErrorAnswer
from app.api.models import Model, ModelList
from app.api.response_shapes import ResponseRequest
from app.api.service import DEFAULT_MODEL
from app.api.tokenising import TokenizeRequest, Tokens, Warmed, WarmRequest
from app.api.usage import ResponseUsage, Timings

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request cannot be used; `param` names the field.",
    401: "The key is missing or not valid.",
    403: "The request came from another site.",
    404: "There is no such thing, or it is another user's.",
    405: "This URL cannot be asked with that method.",
    409: "Another answer of this conversation is being written.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "Too many requests of this user or key at once; see Retry-After.",
    500: "The server failed.",
    503: "The engine is being started again, or the server is busy; see Retry-After.",
}


class Item(msgspec.Struct, kw_only=True):
    """A message of a response or conversation."""

    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["user", "assistant", "system", "developer"]
    content: list[dict[str, Any]]


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseObject(msgspec.Struct, kw_only=True):
    """An answer; see OpenAI's description for the fields that only repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[Item]
    instructions: str | None
    previous_response_id: str | None
    metadata: dict[str, str]
    incomplete_details: dict[str, str] | None
    error: dict[str, str] | None
    usage: ResponseUsage | None
    timings: Timings | None


@dataclass(frozen=True)
class _Operation:
    method: str
    path: str
    name: str
    summary: str
    answer: Any
    body: Any = None
    streams: bool = False
    body_required: bool = True
    query: tuple[str, ...] = ()


_EVENT = {  # in OpenAPI 3.1 the schema of a stream is that of each of its events
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_PAGES = ("limit", "after", "order")
_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "after": {"type": "string", "description": "the id of the item before the page"},
    "order": {"enum": ["asc", "desc"], "type": "string"},
}
_RESPONSE, _CONVERSATION = "/responses/{response_id}", "/conversations/{conversation_id}"
_OPERATIONS = (
    _Operation("get", "/models", "listModels", "List the server's model", ModelList),
    _Operation("get", "/models/{name}", "getModel", "Get a model", Model),
    _Operation(
        "post",
        "/chat/completions",
        "createChatCompletion",
        "Answer a chat",
        ChatCompletion,
        ChatCompletionRequest,
        streams=True,
    ),
    _Operation("post", "/tokenize", "tokenize", "Count tokens", Tokens, TokenizeRequest),
    _Operation("post", "/warm", "warm", "Bring a chat's state back", Warmed, WarmRequest),
    _Operation(
        "post",
        "/responses",
        "createResponse",
        "Answer an input and keep it",
        ResponseObject,
        ResponseRequest,
        streams=True,
    ),
    _Operation("get", _RESPONSE, "getResponse", "Get a kept response", ResponseObject),
    _Operation("delete", _RESPONSE, "deleteResponse", "Delete a kept response", Deleted),
    _Operation(
        "get",
        f"{_RESPONSE}/input_items",
        "listInputItems",
        "List what a response answered",
        ItemList,
        query=_PAGES,
    ),
    _Operation(
        "post",
        "/conversations",
        "createConversation",
        "Begin a conversation",
        Conversation,
        ConversationRequest,
        body_required=False,
    ),
    _Operation("get", _CONVERSATION, "getConversation", "Get a conversation", Conversation),
    _Operation(
        "post",
        _CONVERSATION,
        "changeConversation",
        "Change a conversation's metadata",
        Conversation,
        ConversationChange,
    ),
    _Operation("delete", _CONVERSATION, "deleteConversation", "Delete a conversation", Deleted),
    _Operation("get", f"{_CONVERSATION}/items", "listItems", "List items", ItemList, query=_PAGES),
    _Operation("post", f"{_CONVERSATION}/items", "createItems", "Add items", ItemList, NewItems),
    _Operation("get", f"{_CONVERSATION}/items/{{item_id}}", "getItem", "Get an item", Item),
    _Operation(
        "delete",
        f"{_CONVERSATION}/items/{{item_id}}",
        "deleteItem",
        "Take an item out",
        Conversation,
    ),
)


def openapi_document(model_name: str) -> dict[str, Any]:
    """The description of the API of a server with this model."""
    types = [one.answer for one in _OPERATIONS] + [ErrorAnswer]
    types += [one.body for one in _OPERATIONS if one.body is not None]
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    for schema in components.values():
        model = schema.get("properties", {}).get("model")
        if schema["title"].endswith("Request") and model is not None:
            known = {"type": "string", "enum": [model_name, DEFAULT_MODEL]}
            required = "model" in schema["required"]
            schema["properties"]["model"] = (
                known if required else {"anyOf": [known, {"type": "null"}], "default": None}
            )
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(f"/v1{operation.path}", {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rejoinder",
            "version": importlib.metadata.version("rejoinder"),
            "description": "Chats whose state comes back. OpenAI's API as far as it goes here, "
            "with additions: `timings`, `/v1/tokenize` and `/v1/warm`.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _described(operation: _Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": _ref(operation.answer)}}
    if operation.streams:
        answer["text/event-stream"] = {"schema": _EVENT}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": answer}}
    for status, words in _ERRORS.items():
        responses[str(status)] = {
            "description": words,
            "content": {"application/json": {"schema": _ref(ErrorAnswer)}},
        }
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses,
    }
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    parameters += [{"name": n, "in": "query", "schema": _QUERY[n]} for n in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.body_required,
            "content": {"application/json": {"schema": _ref(operation.body)}},
        }
    return described


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}

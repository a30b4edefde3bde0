"""Conversations: chats that the server keeps under a name."""

from __future__ import annotations

from dataclasses import replace

from litestar import delete, get, post
from litestar.params import FromPath, FromQuery
from litestar.response.base import ASGIResponse

from app.api.bodies import read_body
from app.api.conversations import (
    ConversationChange,
    ConversationRequest,
    Deleted,
    NewItems,
    any_item_json,
    conversation_of,
)
from app.api.errors import not_found
from app.api.items import changed_meanwhile, item_json, items_of, key_of, page_of
from app.api.requests import ApiRequest
from app.api.stored_items import StoredItems
from app.routes.v1.common import UseCaller, UseConversation, json_answer, json_page
from app.services import UseServices


@post("/conversations", status_code=200)
async def create_conversation(
    request: ApiRequest, services: UseServices, caller: UseCaller
) -> ASGIResponse:
    """Begin a conversation."""
    body = await read_body(request, ConversationRequest, optional=True)
    items = items_of(body.items or [], "items", services.settings.max_message_chars)
    made = await services.repository.create_conversation(caller.user_id, items, body.metadata or {})
    return json_answer(conversation_of(made))


@get("/conversations/{conversation_id:str}")
async def get_conversation(caller: UseCaller, conversation: UseConversation) -> ASGIResponse:
    """A conversation without its items."""
    return json_answer(conversation_of(conversation))


@post("/conversations/{conversation_id:str}", status_code=200)
async def change_conversation(
    request: ApiRequest, services: UseServices, caller: UseCaller, conversation: UseConversation
) -> ASGIResponse:
    """Give a conversation other metadata."""
    body = await read_body(request, ConversationChange)
    if not await services.repository.change_conversation(
        conversation, items=conversation.items, labels=body.metadata
    ):
        raise changed_meanwhile()
    return json_answer(conversation_of(replace(conversation, labels=body.metadata)))


@delete("/conversations/{conversation_id:str}", status_code=200)
async def delete_conversation(
    services: UseServices, caller: UseCaller, conversation: UseConversation
) -> ASGIResponse:
    """Delete a conversation; stored responses that were made in it stay."""
    name = conversation_of(conversation).id
    if not await services.repository.delete_conversation(caller.user_id, conversation.id):
        raise not_found("conversation", name, "conversation_id")
    return json_answer(Deleted(id=name, object="conversation.deleted"))


@get("/conversations/{conversation_id:str}/items")
async def list_items(
    services: UseServices,
    caller: UseCaller,
    conversation: UseConversation,
    limit: FromQuery[str | None] = None,
    after: FromQuery[str | None] = None,
    order: FromQuery[str | None] = None,
) -> ASGIResponse:
    """The messages of a conversation, by default the latest first."""
    items = await StoredItems(services.repository).all(conversation)
    return json_page([any_item_json(one) for one in items], limit, after, order)


@post("/conversations/{conversation_id:str}/items", status_code=200)
async def add_items(
    request: ApiRequest, services: UseServices, caller: UseCaller, conversation: UseConversation
) -> ASGIResponse:
    """Add messages, which the next response in the conversation will follow."""
    body = await read_body(request, NewItems)
    items = items_of(body.items, "items", services.settings.max_message_chars)
    await StoredItems(services.repository).add(conversation, items)
    made = [item_json(item) for item in items]
    return json_answer(page_of(made, limit=len(made), after=None, descending=False))


@get("/conversations/{conversation_id:str}/items/{item_id:str}")
async def get_item(
    services: UseServices,
    caller: UseCaller,
    conversation: UseConversation,
    item_id: FromPath[str],
) -> ASGIResponse:
    """One message of a conversation."""
    key = key_of(item_id, "msg_", "item", "item_id")
    for item in await StoredItems(services.repository).all(conversation):
        if item.id == key:
            return json_answer(any_item_json(item))
    raise not_found("item", item_id, "item_id")


@delete("/conversations/{conversation_id:str}/items/{item_id:str}", status_code=200)
async def delete_item(
    services: UseServices,
    caller: UseCaller,
    conversation: UseConversation,
    item_id: FromPath[str],
) -> ASGIResponse:
    """Take one message out of a conversation."""
    key = key_of(item_id, "msg_", "item", "item_id")
    await StoredItems(services.repository).remove(conversation, key)
    return json_answer(conversation_of(conversation))


HANDLERS = [
    create_conversation,
    get_conversation,
    change_conversation,
    delete_conversation,
    list_items,
    add_items,
    get_item,
    delete_item,
]

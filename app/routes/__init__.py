"""The HTTP interface: each module has its handlers and lists them in `HANDLERS`."""

from app.routes import (
    account,
    assistants,
    chat_list,
    chats,
    health,
    history,
    latency,
    messages,
    operator,
    pages,
    people,
    queued,
    sign_in,
    turns,
)

ROUTE_HANDLERS = [
    *pages.HANDLERS,
    *chats.HANDLERS,
    *assistants.HANDLERS,
    *chat_list.HANDLERS,
    *history.HANDLERS,
    *turns.HANDLERS,
    *messages.HANDLERS,
    *queued.HANDLERS,
    *latency.HANDLERS,
    *operator.HANDLERS,
    *sign_in.HANDLERS,
    *account.HANDLERS,
    *people.HANDLERS,
    *health.HANDLERS,
]

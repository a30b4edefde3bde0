"""The HTTP interface: each module has its handlers and lists them in `HANDLERS`."""

from app.routes import (
    chat_list,
    chats,
    health,
    history,
    latency,
    messages,
    pages,
    queued,
    turns,
)

ROUTE_HANDLERS = [
    *pages.HANDLERS,
    *chats.HANDLERS,
    *chat_list.HANDLERS,
    *history.HANDLERS,
    *turns.HANDLERS,
    *messages.HANDLERS,
    *queued.HANDLERS,
    *latency.HANDLERS,
    *health.HANDLERS,
]

"""The HTTP interface: each module has its handlers and lists them in `HANDLERS`."""

from app.routes import chats, health, latency, pages, turns

ROUTE_HANDLERS = [
    *pages.HANDLERS,
    *chats.HANDLERS,
    *turns.HANDLERS,
    *latency.HANDLERS,
    *health.HANDLERS,
]

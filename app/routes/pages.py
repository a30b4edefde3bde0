"""Pages that are read."""

from __future__ import annotations

from datetime import UTC, datetime

from litestar import Response, get
from litestar.params import FromPath, FromQuery

from app import pages
from app.routes.browser import html, user_id_of
from app.services import HTTPRequest, UseServices


@get("/", include_in_schema=False)
async def home(
    request: HTTPRequest,
    services: UseServices,
    before: FromQuery[str] = "",
) -> Response[str]:
    user_id = await user_id_of(request)
    return html(await pages.home_page(services, request, user_id, before=_time(before)))


@get("/chats/{chat_id:str}", include_in_schema=False)
async def chat(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    found = await pages.own_chat(services, await user_id_of(request), chat_id)
    return html(await pages.chat_page(services, request, found))


@get("/favicon.ico", include_in_schema=False, status_code=204)
async def favicon() -> None:
    """Browsers ask for it unasked; there is none."""


def _time(text: str) -> datetime | None:
    """A time of a link to older chats; None for anything else, which shows the latest."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


HANDLERS = [home, chat, favicon]

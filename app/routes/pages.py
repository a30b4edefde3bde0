"""Pages that are read."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromPath, FromQuery

from app import chat_pages, pages
from app.routes.browser import html, user_id_of, versioned_html
from app.security import OPEN
from app.services import HTTPRequest, UseServices


@get("/", include_in_schema=False)
async def home(
    request: HTTPRequest,
    services: UseServices,
    after: FromQuery[str] = "",
    assistant: FromQuery[str] = "",
) -> Response[str]:
    user_id = await user_id_of(request)
    page = await pages.home_page(services, request, user_id, after=after, assistant_id=assistant)
    return html(page)


@get("/chats/{chat_id:str}", include_in_schema=False)
async def chat(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    found = await pages.own_chat(services, await user_id_of(request), chat_id)
    return versioned_html(request, await chat_pages.chat_page(services, request, found))


@get("/favicon.ico", include_in_schema=False, status_code=204, opt=OPEN)
async def favicon() -> None:
    """Browsers ask for it unasked; there is none."""


HANDLERS = [home, chat, favicon]

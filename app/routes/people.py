"""For operators: who has an account, and who is invited."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath

from app import pages
from app.accounts.service import INVITATION_LASTS, MadeLink, invite, offer_reset
from app.faults import NoSuchPage
from app.routes.browser import form_field, go_to, html, user_id_of
from app.security import current_user, require_operator
from app.services import HTTPRequest, Services, UseServices
from sessions.records import User

DAYS = {"1": timedelta(days=1), "7": INVITATION_LASTS, "30": timedelta(days=30)}


@get("/people", include_in_schema=False)
async def people(request: HTTPRequest, services: UseServices) -> Response[str]:
    await require_operator(request)
    return html(await _page(request, services))


@post("/people/invitations", include_in_schema=False)
async def make_invitation(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Make a link; the page that answers is the only one that shows it."""
    await require_operator(request)
    made = await invite(
        services.repository,
        for_operator=bool(await form_field(request, "for_operator")),
        lasts=DAYS.get(await form_field(request, "days"), INVITATION_LASTS),
    )
    return html(await _page(request, services, made=_url(request, services, made)))


@post("/people/invitations/{link_id:str}/end", include_in_schema=False)
async def end_invitation(
    request: HTTPRequest, services: UseServices, link_id: FromPath[str]
) -> Response[str]:
    await require_operator(request)
    if link_id not in {link.id for link in await services.repository.open_invitations()}:
        raise NoSuchPage
    await services.repository.end_link(link_id)
    return go_to(request, "/people")


@post("/people/{user_id:str}/disable", include_in_schema=False)
async def disable(
    request: HTTPRequest, services: UseServices, user_id: FromPath[str]
) -> Response[str]:
    """End somebody's logins and refuse their keys. Not one's own: nobody could undo it."""
    await require_operator(request)
    if user_id == await user_id_of(request):
        raise NoSuchPage
    await _account(services, user_id)
    await services.repository.disable_user(user_id)
    return go_to(request, "/people")


@post("/people/{user_id:str}/enable", include_in_schema=False)
async def enable(
    request: HTTPRequest, services: UseServices, user_id: FromPath[str]
) -> Response[str]:
    await require_operator(request)
    await _account(services, user_id)
    await services.repository.enable_user(user_id)
    return go_to(request, "/people")


@post("/people/{user_id:str}/new-password", include_in_schema=False)
async def new_password(
    request: HTTPRequest, services: UseServices, user_id: FromPath[str]
) -> Response[str]:
    """Make a link by which somebody sets a new password."""
    await require_operator(request)
    user = await _account(services, user_id)
    made = await offer_reset(services.repository, user_id)
    url = _url(request, services, made)
    return html(await _page(request, services, made=url, made_for=user.name))


async def _account(services: Services, user_id: str) -> User:
    found = [one.user for one in await services.repository.accounts() if one.user.id == user_id]
    if not found:
        raise NoSuchPage
    return found[0]


def _url(request: HTTPRequest, services: Services, made: MadeLink) -> str:
    base = services.settings.public_url or str(request.base_url).rstrip("/")
    return base + made.path


async def _page(request: HTTPRequest, services: Services, **more: Any) -> str:
    user = await current_user(request)
    context = await pages.sidebar(services, user.id if user else None)
    context |= {
        "user": user,
        "accounts": await services.repository.accounts(),
        "invitations": await services.repository.open_invitations(),
        "made": "",
        "made_for": "",
        **more,
    }
    return services.views.page(request, "people.html", context)


HANDLERS = [
    people,
    make_invitation,
    end_invitation,
    disable,
    enable,
    new_password,
]

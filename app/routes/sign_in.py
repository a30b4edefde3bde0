"""Signing in and out, and the links that make an account or a new password."""

from __future__ import annotations

from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath, FromQuery

from app.accounts.names import MAX_NAME_CHARS, NAME_RULE, local_path, name_of
from app.accounts.passwords import MAX_CHARS, MIN_CHARS, PASSWORD_RULE, clean_password
from app.errors import DomainError, problem_of
from app.routes.browser import form_field, go_to, html
from app.security import OPEN, current_user
from app.security.login import (
    clear_login,
    hash_token,
    login_behind,
    login_hash,
    new_login,
    new_token,
    set_login,
)
from app.services import HTTPRequest, Services, UseServices
from app.views import Problem
from sessions.account_records import AccountLink, NewLogin
from sessions.errors import LinkNotValid

RULES = {
    "name_rule": NAME_RULE,
    "password_rule": PASSWORD_RULE,
    "max_name": MAX_NAME_CHARS,
    "min_password": MIN_CHARS,
    "max_password": MAX_CHARS,
}


def address_of(request: HTTPRequest) -> str:
    """The address of the browser, or of the nearest proxy that is none of ours."""
    return request.client.host if request.client else ""


@get("/sign-in", include_in_schema=False, opt=OPEN)
async def sign_in_page(
    request: HTTPRequest,
    services: UseServices,
    next_path: FromQuery[str] = "",
) -> Response[str]:
    user = await current_user(request)
    if user is not None and not user.is_guest:
        return go_to(request, local_path(next_path))
    return html(await _sign_in_page(request, services, next_path))


@post("/sign-in", include_in_schema=False, opt=OPEN)
async def sign_in(request: HTTPRequest, services: UseServices) -> Response[str]:
    """A new login; the one that the browser had ends, a guest's too."""
    next_path = await form_field(request, "next_path")
    name = await form_field(request, "name")
    try:
        user = await services.accounts.check(
            name, await form_field(request, "password"), address_of(request)
        )
    except DomainError as error:
        problem = problem_of(error)
        page = await _sign_in_page(request, services, next_path, name=name, problem=problem)
        return html(page, problem=problem)
    token, new, old = await _logins(request)
    user = await services.repository.sign_in(
        user.id, new, old_hash=old, take_along=bool(await form_field(request, "take_along"))
    )
    set_login(request, user, token)
    return go_to(request, local_path(next_path))


@post("/sign-out", include_in_schema=False, opt=OPEN)
async def sign_out(request: HTTPRequest, services: UseServices) -> Response[str]:
    """End this login; a guest who was there before is there again."""
    user = await current_user(request)
    old = login_hash(request.scope)
    if user is not None and old is not None and not user.is_guest:
        token = new_token()
        guest = await services.repository.sign_out(old, new_login(request.scope, token))
        if guest is not None:
            set_login(request, guest, token)
        else:
            clear_login(request)
    return go_to(request, after_sign_out(services))


def after_sign_out(services: Services) -> str:
    """Where somebody goes who has no account any more in this browser."""
    return "/sign-in" if services.settings.accounts_required else "/"


@get("/invitations/{token:str}", include_in_schema=False, opt=OPEN)
async def invitation_page(
    request: HTTPRequest, services: UseServices, token: FromPath[str]
) -> Response[str]:
    """Looking at an invitation does not use it."""
    link = await _link(services, token, for_password=False)
    return html(await _invitation_page(request, services, link))


@post("/invitations/{token:str}", include_in_schema=False, opt=OPEN)
async def accept_invitation(
    request: HTTPRequest, services: UseServices, token: FromPath[str]
) -> Response[str]:
    """Make the account and sign the browser in."""
    link = await _link(services, token, for_password=False)
    shown_name = await form_field(request, "name")
    try:
        name = name_of(shown_name)
        password = clean_password(await form_field(request, "password"))
        login, new, old = await _logins(request)
        user = await services.accounts.register(
            token,
            name,
            password,
            new,
            old_hash=old,
            take_along=bool(await form_field(request, "take_along")),
            address=address_of(request),
        )
    except DomainError as error:
        problem = problem_of(error)
        page = await _invitation_page(request, services, link, name=shown_name, problem=problem)
        return html(page, problem=problem)
    set_login(request, user, login)
    return go_to(request, "/")


@get("/new-password/{token:str}", include_in_schema=False, opt=OPEN)
async def new_password_page(
    request: HTTPRequest, services: UseServices, token: FromPath[str]
) -> Response[str]:
    link = await _link(services, token, for_password=True)
    return html(await _new_password_page(request, services, link))


@post("/new-password/{token:str}", include_in_schema=False, opt=OPEN)
async def set_new_password(
    request: HTTPRequest, services: UseServices, token: FromPath[str]
) -> Response[str]:
    """Set it, end all logins, and have the person sign in with it."""
    link = await _link(services, token, for_password=True)
    try:
        password = clean_password(await form_field(request, "password"))
        await services.accounts.reset(token, password, address_of(request))
    except DomainError as error:
        problem = problem_of(error)
        return html(
            await _new_password_page(request, services, link, problem=problem), problem=problem
        )
    return go_to(request, "/sign-in")


async def _logins(request: HTTPRequest) -> tuple[str, NewLogin, str | None]:
    """The token of a login to be made, what is kept of it, the hash of the one there is."""
    token = new_token()
    return token, new_login(request.scope, token), await login_behind(request)


async def _link(services: Services, token: str, *, for_password: bool) -> AccountLink:
    link = await services.repository.link(hash_token(token))
    if link is None or (link.user_id is not None) != for_password:
        raise LinkNotValid
    return link


async def num_guest_chats(request: HTTPRequest, services: Services) -> int:
    """How many chats the guest has who was in this browser before an account."""
    login = await login_behind(request)
    guest = None if login is None else await services.repository.guest_behind(login)
    return 0 if guest is None else await services.repository.num_chats(guest.id)


async def _sign_in_page(
    request: HTTPRequest, services: Services, next_path: str, **more: Any
) -> str:
    context: dict[str, Any] = {
        "name": "",
        "next_path": local_path(next_path),
        "guest_chats": await num_guest_chats(request, services),
        "no_operator": not await services.repository.has_operator(),
        "accounts_required": services.settings.accounts_required,
        **RULES,
        **more,
    }
    return services.views.page(request, "sign_in.html", context)


async def _invitation_page(
    request: HTTPRequest,
    services: Services,
    link: AccountLink,
    *,
    name: str = "",
    problem: Problem | None = None,
) -> str:
    user = await current_user(request)
    context: dict[str, Any] = {
        "for_operator": link.for_operator,
        "expires_at": link.expires_at,
        "name": name,
        "signed_in_as": None if user is None else user.name,
        "guest_chats": await num_guest_chats(request, services),
        "problem": problem,
        **RULES,
    }
    return services.views.page(request, "invitation.html", context)


async def _new_password_page(
    request: HTTPRequest, services: Services, link: AccountLink, *, problem: Problem | None = None
) -> str:
    assert link.user_id is not None, "it was looked up as such a link"
    user = await services.repository.user(link.user_id)
    context = {"user": user, "problem": problem, **RULES}
    return services.views.page(request, "new_password.html", context)


HANDLERS = [
    sign_in_page,
    sign_in,
    sign_out,
    invitation_page,
    accept_invitation,
    new_password_page,
    set_new_password,
]

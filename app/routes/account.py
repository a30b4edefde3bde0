"""A person's own account: name, password, where it is signed in, keys, its end."""

from __future__ import annotations

from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath

from app import pages
from app.accounts.names import name_of
from app.accounts.passwords import clean_password
from app.api.keys import HINT_CHARS, hash_key, new_key
from app.errors import DomainError, problem_of
from app.faults import InvalidField, NoSuchPage
from app.routes.browser import form_field, go_to, html
from app.routes.sign_in import RULES, address_of, after_sign_out
from app.security import current_user, ensure_user, is_operator
from app.security.login import (
    clear_login,
    login_hash,
    new_login,
    new_token,
    set_login,
)
from app.services import HTTPRequest, Services, UseServices
from sessions.records import User

MAX_KEYS = 50
MAX_KEY_NAME_CHARS = 60


@get("/account", include_in_schema=False)
async def account(request: HTTPRequest, services: UseServices) -> Response[str]:
    return html(await _page(request, services))


@post("/account/claim", include_in_schema=False)
async def claim(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Give a guest a name and a password; the chats stay."""
    shown = await form_field(request, "name")
    try:
        name = name_of(shown)
        password = clean_password(await form_field(request, "password"))
        guest = await ensure_user(request)
        if not guest.is_guest:
            raise InvalidField("name", f"You are signed in as {guest.name}.")
        token = new_token()
        user = await services.accounts.claim(
            guest, name, password, new_login(request.scope, token), address_of(request)
        )
    except DomainError as error:
        problem = problem_of(error)
        return html(await _page(request, services, name=shown, problem=problem), problem=problem)
    set_login(request, user, token)
    return go_to(request, "/account")


@post("/account/password", include_in_schema=False)
async def change_password(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Set a new password: this browser gets a new login, all others are signed out."""
    user = await _own(request)
    try:
        password = clean_password(await form_field(request, "password"))
        await services.accounts.check_own(
            user, await form_field(request, "old_password"), address_of(request)
        )
        await services.accounts.change_password(user, password, login_hash(request.scope))
    except DomainError as error:
        problem = problem_of(error)
        return html(await _page(request, services, problem=problem), problem=problem)
    token = new_token()
    if await services.repository.rotate_login(
        login_hash(request.scope) or "", new_login(request.scope, token)
    ):
        set_login(request, user, token)
    return html(await _page(request, services, done="Your password was changed."))


@post("/account/logins/{login_id:str}/end", include_in_schema=False)
async def end_login(
    request: HTTPRequest, services: UseServices, login_id: FromPath[str]
) -> Response[str]:
    user = await _own(request)
    if not await services.repository.end_login(user.id, login_id):
        raise NoSuchPage
    return go_to(request, "/account#logins")


@post("/account/sign-out-everywhere", include_in_schema=False)
async def sign_out_everywhere(request: HTTPRequest, services: UseServices) -> Response[str]:
    """End all logins, this one included; a guest who was in this browser is there again."""
    user = await _own(request)
    await services.repository.end_logins(user.id, but=login_hash(request.scope))
    await _leave(request, services)
    return go_to(request, after_sign_out(services))


@post("/account/guest", include_in_schema=False)
async def take_guest_along(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Take what the guest has who was in this browser before."""
    user = await _own(request)
    if not await services.repository.take_guest_along(user.id, login_hash(request.scope) or ""):
        raise NoSuchPage
    return go_to(request, "/account")


@post("/account/keys", include_in_schema=False)
async def make_key(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Make a key of the API; the page that answers is the only one that shows it."""
    user = await ensure_user(request)
    name = " ".join((await form_field(request, "key_name")).split())[:MAX_KEY_NAME_CHARS]
    try:
        if not name:
            raise InvalidField("key_name", "Give the key a name, to know it again.")
        if len(await services.repository.valid_api_keys(user.id)) >= MAX_KEYS:
            raise InvalidField("key_name", f"There are {MAX_KEYS} keys; revoke one first.")
        key = new_key()
        await services.repository.create_api_key(
            name, hash_key(key), key[-HINT_CHARS:], user_id=user.id
        )
    except DomainError as error:
        problem = problem_of(error)
        return html(await _page(request, services, problem=problem), problem=problem)
    return html(await _page(request, services, new_key=key))


@post("/account/keys/{key_id:str}/revoke", include_in_schema=False)
async def revoke_key(
    request: HTTPRequest, services: UseServices, key_id: FromPath[str]
) -> Response[str]:
    user = await current_user(request)
    if user is None or not await services.repository.revoke_api_key(key_id, user_id=user.id):
        raise NoSuchPage
    return go_to(request, "/account#keys")


@post("/account/delete", include_in_schema=False)
async def delete(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Delete the account and all of its chats for good."""
    user = await _own(request)
    try:
        await services.accounts.check_own(
            user, await form_field(request, "old_password"), address_of(request)
        )
        accounts = [one.user for one in await services.repository.accounts()]
        operators = [one for one in accounts if one.is_operator and one.disabled_at is None]
        if operators == [user] and len(accounts) > 1:
            raise InvalidField(
                "old_password",
                "You are the only operator. Invite another one before you leave.",
            )
    except DomainError as error:
        problem = problem_of(error)
        return html(await _page(request, services, problem=problem), problem=problem)
    await _leave(request, services)
    await services.accounts.delete(user)
    return go_to(request, after_sign_out(services))


async def _own(request: HTTPRequest) -> User:
    """The account that is signed in. Raises NoSuchPage for a guest."""
    user = await current_user(request)
    if user is None or user.is_guest:
        raise NoSuchPage
    return user


async def _leave(request: HTTPRequest, services: Services) -> None:
    token = new_token()
    guest = await services.repository.sign_out(
        login_hash(request.scope) or "", new_login(request.scope, token)
    )
    if guest is None:
        clear_login(request)
    else:
        set_login(request, guest, token)


async def _page(request: HTTPRequest, services: Services, **more: Any) -> str:
    user = await current_user(request)
    repository, here = services.repository, login_hash(request.scope)
    guest = None
    if user is not None and not user.is_guest and here is not None:
        guest = await repository.guest_behind(here)
    context = await pages.sidebar(services, user.id if user else None)
    context |= {
        "user": user,
        "logins": [] if user is None else await repository.logins(user.id),
        "here": here,
        "keys": [] if user is None else await repository.valid_api_keys(user.id),
        "guest_chats": 0 if guest is None else await repository.num_chats(guest.id),
        "operator": await is_operator(request),
        "name": "",
        "new_key": "",
        "done": "",
        "max_key_name": MAX_KEY_NAME_CHARS,
        **RULES,
        **more,
    }
    return services.views.page(request, "account.html", context)


HANDLERS = [
    account,
    claim,
    change_password,
    end_login,
    sign_out_everywhere,
    take_guest_along,
    make_key,
    revoke_key,
    delete,
]

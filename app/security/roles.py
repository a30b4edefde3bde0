"""Who may do what only operators may: see all of the server, publish, invite."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException, PermissionDeniedException

from app.security.login import current_user, hash_token
from sessions.records import User
from sessions.repository import Repository

_Connection = ASGIConnection[Any, Any, Any, Any]


async def is_operator(request: _Connection) -> bool:
    """Tell whether the browser is an operator's.

    On a server that asks for no accounts everybody is one until an account is: who reaches it
    sits in front of the machine.
    """
    user = await current_user(request)
    return await _may_operate(request, user)


async def require_operator(request: _Connection) -> None:
    """Raise 401 or 403 unless the browser is an operator's, or the request has an operator's key.

    The key is that of the API, as `Authorization: Bearer KEY`, for programs that read figures.
    """
    given = request.headers.getall("authorization", [])
    if given:
        user = await _user_of_key(request, given)
        if user is None:
            raise NotAuthorizedException("The API key is not valid, or it was revoked.")
        if not user.is_operator:
            raise PermissionDeniedException("Only an operator's API key opens this.")
    elif not await is_operator(request):
        user = await current_user(request)
        if user is None or user.is_guest:
            raise NotAuthorizedException("Only operators see this. Sign in as one.")
        raise PermissionDeniedException("Only operators see this.")


async def _may_operate(request: _Connection, user: User | None) -> bool:
    if user is not None and user.is_operator:
        return True
    if request.app.state.accounts_required:
        return False
    repository: Repository = request.app.state.repository
    return not await repository.has_operator()


async def _user_of_key(request: _Connection, given: list[str]) -> User | None:
    repository: Repository = request.app.state.repository
    scheme, _, key = given[0].partition(" ")
    if len(given) != 1 or scheme.lower() != "bearer":
        return None
    found = await repository.api_key(hash_token(key.strip()))
    return None if found is None else await repository.user(found.user_id)

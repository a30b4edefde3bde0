"""What people do to their accounts, with its checks; routes and pages are elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

from app.accounts.names import name_key
from app.accounts.passwords import Passwords
from app.accounts.throttle import Throttle, network_of
from app.faults import WrongPassword
from app.security.login import hash_token, new_token
from sessions.account_records import AccountLink, Name, NewLogin
from sessions.records import User
from sessions.repository import Repository

WINDOW_S = 15 * 60.0
TRIES_OF_A_NAME = 10
TRIES_OF_AN_ADDRESS = 30
INVITATION_LASTS = timedelta(days=7)
RESET_LASTS = timedelta(days=1)


@dataclass(frozen=True)
class MadeLink:
    """A link that is told this once."""

    path: str
    record: AccountLink


class Accounts:
    """Owns the tries of those who sign in, and the thread of the passwords. Event loop only."""

    def __init__(
        self,
        repository: Repository,
        delete_chat: Callable[[str, str], Awaitable[bool]],
        passwords: Passwords | None = None,
    ) -> None:
        """`delete_chat` stops what runs in a chat of a user, and deletes it."""
        self._repository = repository
        self._delete_chat = delete_chat
        self._passwords = passwords or Passwords()
        self._names = Throttle(TRIES_OF_A_NAME, WINDOW_S)
        self._addresses = Throttle(TRIES_OF_AN_ADDRESS, WINDOW_S)

    def close(self) -> None:
        self._passwords.close()

    async def check(self, name: str, password: str, address: str) -> User:
        """The user with this name and password. Raises WrongPassword, TooManyTries.

        It takes as long, and says the same, whether the name or the password is wrong.
        """
        key = name_key(name[:1000])
        self._addresses.take(network_of(address))
        self._names.take(key)
        found = await self._repository.credentials(key)
        stored = None if found is None else found.password_hash
        if not await self._passwords.matches(stored, password) or found is None:
            raise WrongPassword("password", "This name and password do not fit together.")
        self._names.forgive(key)
        if self._passwords.is_outdated(found.password_hash):
            await self._repository.set_password(found.user.id, await self._passwords.hash(password))
        return found.user

    async def check_own(self, user: User, password: str, address: str) -> None:
        """Check the password of somebody who is signed in. Raises WrongPassword, TooManyTries."""
        self._addresses.take(network_of(address))
        self._names.take(user.id)
        stored = await self._repository.password_hash(user.id)
        if not await self._passwords.matches(stored, password):
            raise WrongPassword("old_password", "This is not your password.")
        self._names.forgive(user.id)

    async def claim(
        self, user: User, name: Name, password: str, new: NewLogin, address: str
    ) -> User:
        """Make a guest an account. Raises NameTaken, NotFound, TooManyTries."""
        self._addresses.take(network_of(address))
        hashed = await self._passwords.hash(password)
        return await self._repository.claim_account(user.id, name, hashed, new)

    async def register(
        self,
        token: str,
        name: Name,
        password: str,
        new: NewLogin,
        *,
        old_hash: str | None,
        take_along: bool,
        address: str,
    ) -> User:
        """Use an invitation. Raises LinkNotValid, NameTaken, TooManyTries."""
        self._addresses.take(network_of(address))
        hashed = await self._passwords.hash(password)
        return await self._repository.register(
            hash_token(token), name, hashed, new, old_hash=old_hash, take_along=take_along
        )

    async def reset(self, token: str, password: str, address: str) -> User:
        """Use a link for a new password. Raises LinkNotValid, TooManyTries."""
        self._addresses.take(network_of(address))
        return await self._repository.reset_password(
            hash_token(token), await self._passwords.hash(password)
        )

    async def change_password(self, user: User, password: str, login: str | None) -> None:
        """Set a new password; all logins but the one with this hash end. Raises TooManyTries."""
        await self._repository.set_password(user.id, await self._passwords.hash(password))
        await self._repository.end_logins(user.id, but=login)

    async def delete(self, user: User) -> None:
        """Delete an account: nobody can sign in as it any more, its chats go with the purge."""
        await self._repository.disable_user(user.id)
        for chat_id in await self._repository.running_chats(user.id):
            await self._delete_chat(user.id, chat_id)
        await self._repository.delete_account(user.id)


async def invite(repository: Repository, *, for_operator: bool, lasts: timedelta) -> MadeLink:
    """Make an invitation."""
    token = new_token()
    record = await repository.create_link(hash_token(token), lasts=lasts, for_operator=for_operator)
    return MadeLink(f"/invitations/{token}", record)


async def offer_reset(repository: Repository, user_id: str) -> MadeLink:
    """Make a link by which a user sets a new password."""
    token = new_token()
    record = await repository.create_link(hash_token(token), lasts=RESET_LASTS, user_id=user_id)
    return MadeLink(f"/new-password/{token}", record)

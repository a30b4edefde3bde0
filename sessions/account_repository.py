"""The part of the repository that is about accounts: users, logins, links."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncConnection

from sessions.account_records import (
    Account,
    AccountLink,
    Credentials,
    LoginRecord,
    Name,
    NewLogin,
)
from sessions.clock import Clock
from sessions.database import Database
from sessions.errors import LinkNotValid, NotFound
from sessions.queries import account_links, accounts, belongings, logins
from sessions.records import User


class AccountRepository:
    """Base of `Repository`, which sets the attributes."""

    _database: Database
    _clock: Clock

    # Who a browser is

    async def create_user(self, token_hash: str, agent: str = "") -> User:
        """Make a guest whose browser is signed in by the token with this hash."""
        now = self._clock.now()

        async def create(db: AsyncConnection) -> User:
            user = await accounts.create_guest(db, now)
            await logins.add(db, user.id, NewLogin(token_hash=token_hash, agent=agent), now)
            return user

        return await self._database.write(create)

    async def user_by_token(self, token_hash: str) -> User | None:
        """The user whose login has this hash, unless it or the user was ended, or it lay idle.

        Notes the visit, coarsely.
        """
        now = self._clock.now()
        async with self._database.read() as db:
            found = await logins.login(db, token_hash, now)
        if found is None:
            return None
        if now - found.last_seen_at > logins.SEEN_RESOLUTION:
            await self._database.write(lambda db: logins.touch(db, token_hash, now))
        return found.user

    async def guest_behind(self, token_hash: str) -> User | None:
        """The guest of a browser: who is there, or would be there if the account left."""
        async with self._database.read() as db:
            found = await logins.login(db, token_hash, self._clock.now())
            if found is None or found.user.is_guest:
                return found.user if found else None
            return None if found.guest_id is None else await accounts.user(db, found.guest_id)

    async def num_chats(self, user_id: str) -> int:
        """Chats of browsers and of the API, but for deleted ones."""
        async with self._database.read() as db:
            return await belongings.num_chats(db, user_id)

    async def running_chats(self, user_id: str) -> list[str]:
        """Those in which an answer is being written."""
        async with self._database.read() as db:
            return await belongings.running_chats(db, user_id)

    # Signing in and out

    async def claim_account(
        self, user_id: str, name: Name, password_hash: str, new: NewLogin
    ) -> User:
        """Make a guest an account, signed in by the new login alone.

        Raises NameTaken, and NotFound when this is no guest.
        """
        now = self._clock.now()

        async def claim(db: AsyncConnection) -> User:
            user = await accounts.name_user(db, user_id, name, password_hash, False)
            await logins.end(db, user_id, now)
            await logins.add(db, user_id, new, now)
            return user

        return await self._database.write(claim)

    async def register(
        self,
        link_hash: str,
        name: Name,
        password_hash: str,
        new: NewLogin,
        *,
        old_hash: str | None,
        take_along: bool,
    ) -> User:
        """Use an invitation: make the account and sign the browser in, as `sign_in` does.

        Raises LinkNotValid, and NameTaken, after which the invitation can still be used.
        """
        now = self._clock.now()

        async def create(db: AsyncConnection) -> User:
            link = await account_links.use(db, link_hash, now)
            if link.user_id is not None:
                raise LinkNotValid
            user = await accounts.create_account(db, name, password_hash, link.for_operator, now)
            await _enter(db, user.id, new, old_hash, take_along, now)
            return user

        return await self._database.write(create)

    async def sign_in(
        self, user_id: str, new: NewLogin, *, old_hash: str | None, take_along: bool
    ) -> User:
        """Sign a browser in by a new login; the one it had ends.

        A guest's chats either come along, or wait until the browser is signed out. Raises NotFound
        when there is no such user who may sign in.
        """
        now = self._clock.now()

        async def enter(db: AsyncConnection) -> User:
            user = await accounts.user(db, user_id)
            if user.is_guest or user.disabled_at is not None:
                raise NotFound("user", user_id)
            await _enter(db, user_id, new, old_hash, take_along, now)
            return user

        return await self._database.write(enter)

    async def take_guest_along(self, user_id: str, token_hash: str) -> bool:
        """Give a user what the guest behind the login has; False when there is no guest."""
        now = self._clock.now()

        async def take(db: AsyncConnection) -> bool:
            found = await logins.login(db, token_hash, now)
            if found is None or found.user.id != user_id or found.guest_id is None:
                return False
            await belongings.hand_over(db, found.guest_id, user_id)
            await logins.forget_guest(db, found.guest_id)
            return True

        return await self._database.write(take)

    async def sign_out(self, token_hash: str, guest: NewLogin) -> User | None:
        """End a login; the guest who was there before, if any, gets the new one."""
        now = self._clock.now()

        async def leave(db: AsyncConnection) -> User | None:
            found = await logins.login(db, token_hash, now)
            await logins.revoke(db, token_hash, now)
            if found is None or found.guest_id is None:
                return None
            await logins.add(db, found.guest_id, guest, now)
            return await accounts.user(db, found.guest_id)

        return await self._database.write(leave)

    async def rotate_login(self, old_hash: str, new: NewLogin) -> User | None:
        """Replace one login by another of the same user; None when the old one is not valid."""
        now = self._clock.now()

        async def rotate(db: AsyncConnection) -> User | None:
            found = await logins.login(db, old_hash, now)
            if found is None:
                return None
            await logins.revoke(db, old_hash, now)
            await logins.add(db, found.user.id, new, now, guest_id=found.guest_id)
            return found.user

        return await self._database.write(rotate)

    async def revoke_login(self, token_hash: str) -> bool:
        """End a login; False when there was none that was valid."""
        now = self._clock.now()
        return await self._database.write(lambda db: logins.revoke(db, token_hash, now))

    async def logins(self, user_id: str) -> list[LoginRecord]:
        """Where a user is signed in, the latest visit first."""
        async with self._database.read() as db:
            return await logins.of_user(db, user_id, self._clock.now())

    async def end_login(self, user_id: str, login_id: str) -> bool:
        """False when there is no such login of this user."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: _any(logins.end(db, user_id, now, login_id=login_id))
        )

    async def end_logins(self, user_id: str, *, but: str | None = None) -> int:
        """Sign a user out everywhere, or everywhere but where the login has the hash `but`."""
        now = self._clock.now()
        return await self._database.write(lambda db: logins.end(db, user_id, now, but=but))

    # Passwords

    async def credentials(self, name_key: str) -> Credentials | None:
        """What to check a password against; None when nobody with this name may sign in."""
        async with self._database.read() as db:
            return await accounts.credentials(db, name_key=name_key)

    async def password_hash(self, user_id: str) -> str | None:
        async with self._database.read() as db:
            return await accounts.password_hash(db, user_id)

    async def set_password(self, user_id: str, password_hash: str) -> None:
        """Store the hash of a password; logins go on."""
        await self._database.write(lambda db: accounts.set_password(db, user_id, password_hash))

    async def reset_password(self, link_hash: str, password_hash: str) -> User:
        """Use a link for a new password; all logins of its user end. Raises LinkNotValid."""
        now = self._clock.now()

        async def reset(db: AsyncConnection) -> User:
            link = await account_links.use(db, link_hash, now)
            if link.user_id is None:
                raise LinkNotValid
            await accounts.set_password(db, link.user_id, password_hash)
            await logins.end(db, link.user_id, now)
            await account_links.end_of_user(db, link.user_id, now)
            return await accounts.user(db, link.user_id)

        return await self._database.write(reset)

    # Links

    async def create_link(
        self,
        token_hash: str,
        *,
        lasts: timedelta,
        for_operator: bool = False,
        user_id: str | None = None,
    ) -> AccountLink:
        """An invitation, or with `user_id` a way to a new password, instead of earlier ones."""
        now = self._clock.now()

        async def create(db: AsyncConnection) -> AccountLink:
            if user_id is not None:
                await account_links.end_of_user(db, user_id, now)
            return await account_links.create(
                db, token_hash, user_id, for_operator, now, now + lasts
            )

        return await self._database.write(create)

    async def link(self, token_hash: str) -> AccountLink | None:
        """None when the link was used, taken back or has expired."""
        now = self._clock.now()
        async with self._database.read() as db:
            return await account_links.valid(db, token_hash, now)

    async def open_invitations(self) -> list[AccountLink]:
        """Those that can still be used, oldest first."""
        now = self._clock.now()
        async with self._database.read() as db:
            return await account_links.open_invitations(db, now)

    async def end_link(self, link_id: str) -> bool:
        """Take a link back; False when there was none to be used."""
        now = self._clock.now()
        return await self._database.write(lambda db: account_links.end(db, link_id, now))

    # All accounts

    async def accounts(self) -> list[Account]:
        """Users with a name, in the order of their names."""
        async with self._database.read() as db:
            return await accounts.all_accounts(db)

    async def user(self, user_id: str) -> User:
        """Raises NotFound."""
        async with self._database.read() as db:
            return await accounts.user(db, user_id)

    async def user_by_name(self, name_key: str) -> User | None:
        async with self._database.read() as db:
            return await accounts.by_name(db, name_key)

    async def has_operator(self) -> bool:
        """Whether anybody may do what only operators may."""
        async with self._database.read() as db:
            return await accounts.has_operator(db)

    async def disable_user(self, user_id: str) -> bool:
        """End an account's logins and refuse its keys; False when there is no such account."""
        now = self._clock.now()

        async def disable(db: AsyncConnection) -> bool:
            done = await accounts.set_disabled(db, user_id, now)
            if done:
                await logins.end(db, user_id, now)
            return done

        return await self._database.write(disable)

    async def enable_user(self, user_id: str) -> bool:
        """False when there is no such account."""
        return await self._database.write(lambda db: accounts.set_disabled(db, user_id, None))

    async def delete_account(self, user_id: str) -> None:
        """Free the name, end logins, links and keys, and delete all chats for the purge to take."""
        now = self._clock.now()

        async def remove(db: AsyncConnection) -> None:
            await logins.end(db, user_id, now)
            await account_links.end_of_user(db, user_id, now)
            await belongings.let_go(db, user_id, now)
            await accounts.forget(db, user_id, now)

        await self._database.write(remove)


async def _any(number: Awaitable[int]) -> bool:
    return await number > 0


async def _enter(
    db: AsyncConnection,
    user_id: str,
    new: NewLogin,
    old_hash: str | None,
    take_along: bool,
    now: datetime,
) -> None:
    """Sign in, and see to the login that the browser had and to the guest behind it."""
    old = None if old_hash is None else await logins.login(db, old_hash, now)
    guest_id = None
    if old is not None and old_hash is not None:
        guest_id = old.user.id if old.user.is_guest else old.guest_id
        await logins.revoke(db, old_hash, now)
    if guest_id is not None:
        await logins.end(db, guest_id, now)
        if take_along:
            await belongings.hand_over(db, guest_id, user_id)
        if await belongings.num_chats(db, guest_id) == 0:
            guest_id = None
    await logins.add(db, user_id, new, now, guest_id=guest_id)

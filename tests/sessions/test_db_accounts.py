"""Accounts in the database: names are unique, links work once, logins end, nothing is left."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine

from sessions import migrate
from sessions.account_records import Name, NewLogin
from sessions.assistant_records import AssistantDraft
from sessions.errors import LinkNotValid, NameTaken, NotFound
from sessions.records import User
from sessions.repository import Repository
from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio

ADA = Name(shown="Ada", key="ada")
DAY = timedelta(days=1)


def login(token_hash: str) -> NewLogin:
    return NewLogin(token_hash=token_hash, agent="Firefox on Linux")


async def account(repository: Repository, name: str = "Ada") -> User:
    guest = await repository.create_user(f"guest hash of {name}")
    named = Name(shown=name, key=name.lower())
    return await repository.claim_account(guest.id, named, "password hash", login(f"{name} hash"))


async def test_a_guest_becomes_an_account_with_one_login(repository: Repository) -> None:
    user = await account(repository)
    assert (user.name, user.is_operator, user.is_guest) == ("Ada", False, False)
    assert await repository.user_by_token("guest hash of Ada") is None
    assert await repository.user_by_token("Ada hash") == user
    found = await repository.credentials("ada")
    assert found is not None
    assert (found.user, found.password_hash) == (user, "password hash")
    with pytest.raises(NotFound):
        await repository.claim_account(user.id, Name(shown="B", key="b"), "h", login("x"))


async def test_two_who_claim_a_name_at_once_do_not_both_get_it(repository: Repository) -> None:
    guests = [await repository.create_user(f"hash {n}") for n in range(2)]
    claims = [
        repository.claim_account(guest.id, ADA, "password hash", login(f"new {n}"))
        for n, guest in enumerate(guests)
    ]
    results = await asyncio.gather(*claims, return_exceptions=True)
    assert [type(one) for one in results if isinstance(one, Exception)] == [NameTaken]
    loser = guests[isinstance(results[1], Exception)]
    assert await repository.user_by_token(f"hash {guests.index(loser)}") == loser


async def test_an_invitation_makes_one_account(repository: Repository) -> None:
    await repository.create_link("link hash", lasts=DAY, for_operator=True)
    await account(repository)
    register = repository.register
    with pytest.raises(NameTaken):
        await register("link hash", ADA, "h", login("a"), old_hash=None, take_along=False)
    bob = Name(shown="Bob", key="bob")
    user = await register("link hash", bob, "h", login("b"), old_hash=None, take_along=False)
    assert (user.name, user.is_operator) == ("Bob", True)
    eve = Name(shown="Eve", key="eve")
    with pytest.raises(LinkNotValid):
        await register("link hash", eve, "h", login("c"), old_hash=None, take_along=False)
    assert await repository.link("link hash") is None
    assert [one.user.name for one in await repository.accounts()] == ["Ada", "Bob"]


async def test_links_expire_are_taken_back_and_are_not_confused(repository: Repository) -> None:
    user = await account(repository)
    await repository.create_link("old", lasts=timedelta(0))
    await repository.create_link("first", lasts=DAY, user_id=user.id)
    await repository.create_link("second", lasts=DAY, user_id=user.id)
    invitation = await repository.create_link("invitation", lasts=DAY)
    for gone in ("old", "first", "unknown", "invitation"):
        with pytest.raises(LinkNotValid):
            await repository.reset_password(gone, "newer hash")
    name = Name(shown="Bob", key="bob")
    with pytest.raises(LinkNotValid):
        await repository.register("second", name, "h", login("b"), old_hash=None, take_along=False)
    assert await repository.open_invitations() == [invitation]
    assert await repository.reset_password("second", "newer hash") == user
    assert await repository.password_hash(user.id) == "newer hash"
    assert await repository.user_by_token("Ada hash") is None
    assert await repository.end_link(invitation.id)
    assert not await repository.end_link(invitation.id)
    assert await repository.link("invitation") is None


async def test_what_a_guest_has_comes_along_with_all_that_belongs_to_it(
    repository: Repository, chats: Chats
) -> None:
    user = await account(repository)
    guest = await repository.create_user("guest")
    turn = await chats.start("of the guest", user=guest)
    await repository.create_api_key("key", "key hash", "hint", user_id=guest.id)
    await repository.sign_in(user.id, login("here"), old_hash="guest", take_along=True)
    assert await repository.user_by_token("guest") is None
    assert await repository.chat(user.id, turn.chat_id) is not None
    assert await repository.chat(guest.id, turn.chat_id) is None
    key = await repository.api_key("key hash")
    assert key is not None
    assert key.user_id == user.id
    assert await repository.guest_behind("here") is None
    assert await repository.sign_out("here", login("after")) is None


async def test_an_accounts_login_that_lies_idle_is_none_any_more(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await account(repository)
    guest = await repository.create_user("guest hash")
    real, days = repository._clock.now, 29
    monkeypatch.setattr(repository._clock, "now", lambda: real() + days * DAY)
    assert await repository.user_by_token("Ada hash") == user
    days = 58  # 29 since the last visit
    assert await repository.user_by_token("Ada hash") == user
    assert len(await repository.logins(user.id)) == 1
    days = 89
    assert await repository.user_by_token("Ada hash") is None
    assert await repository.logins(user.id) == []
    assert await repository.rotate_login("Ada hash", login("new hash")) is None
    assert await repository.user_by_token("guest hash") == guest, "nothing else leads to its chats"


async def test_a_guest_waits_behind_the_login(repository: Repository, chats: Chats) -> None:
    user = await account(repository)
    guest = await repository.create_user("guest")
    turn = await chats.start("of the guest", user=guest)
    await repository.sign_in(user.id, login("here"), old_hash="guest", take_along=False)
    assert await repository.guest_behind("here") == guest
    assert await repository.chat(user.id, turn.chat_id) is None
    other = await account(repository, "Bob")
    await repository.sign_in(other.id, login("there"), old_hash="here", take_along=False)
    assert await repository.user_by_token("here") is None
    assert await repository.guest_behind("there") == guest
    assert await repository.end_logins(other.id) == 2
    assert await repository.user_by_token("there") == guest, "the browser is its guest's again"
    assert await repository.user_by_token("Bob hash") is None


async def test_who_is_disabled_gets_in_by_nothing(repository: Repository) -> None:
    user = await account(repository)
    await repository.create_api_key("key", "key hash", "hint", user_id=user.id)
    assert await repository.disable_user(user.id)
    assert await repository.user_by_token("Ada hash") is None
    assert await repository.credentials("ada") is None
    assert await repository.api_key("key hash") is None
    with pytest.raises(NotFound):
        await repository.sign_in(user.id, login("x"), old_hash=None, take_along=False)
    assert await repository.enable_user(user.id)
    assert await repository.user_by_token("Ada hash") is None, "logins do not come back"
    assert await repository.api_key("key hash") is not None
    guest = await repository.create_user("a guest")
    assert not await repository.disable_user(guest.id)


async def test_a_deleted_account_frees_its_name_and_keeps_nothing(
    repository: Repository, chats: Chats, db_path: Path
) -> None:
    user = await account(repository)
    turn = await chats.start("of Ada", user=user)
    await chats.answer(turn)
    await repository.create_api_key("key", "key hash", "hint", user_id=user.id)
    await repository.create_link("reset", lasts=DAY, user_id=user.id)
    await repository.delete_account(user.id)
    assert await repository.user_by_token("Ada hash") is None
    assert await repository.api_key("key hash") is None
    assert await repository.link("reset") is None
    assert await repository.chat(user.id, turn.chat_id) is None
    guest = await repository.create_user("another")
    again = await repository.claim_account(guest.id, ADA, "hash", login("newer"))
    assert again.id != user.id
    with closing(sqlite3.connect(db_path)) as db:
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        [row] = db.execute("SELECT * FROM user WHERE id = ?", (user.id,)).fetchall()
        assert "Ada" not in row
        assert "password hash" not in row


async def test_a_deleted_account_takes_its_private_assistants_along(
    repository: Repository, db_path: Path
) -> None:
    user = await account(repository)
    said = "a prompt that nobody else may read"
    draft = AssistantDraft(name="Mine", description="", greeting="", system_prompt=said)
    used, unused = [await repository.create_assistant(user.id, draft) for _ in range(2)]
    shared = await repository.create_assistant(user.id, draft)
    await repository.publish_assistant(shared, True)
    version = await repository.assistant_version(used)
    prefix = await repository.prefix(version.id, "digest", [1, 2])
    await repository.create_chat(user.id, prefix.id, "title")
    await repository.delete_account(user.id)

    def assistants() -> set[str]:
        with closing(sqlite3.connect(db_path)) as db:
            texts = db.execute(
                "SELECT DISTINCT assistant_id FROM assistant_version WHERE system_prompt = ?",
                (said,),
            )
            return {one for (one,) in texts}

    assert assistants() == {used, shared}, "until its chat is purged"
    assert await repository.purge_deleted(datetime.now(UTC) + DAY) == 1
    assert assistants() == {shared}, "what was published stays with those who use it"
    assert unused not in assistants()


async def test_accounts_come_to_a_database_with_data(tmp_path: Path) -> None:
    older = tmp_path / "older.db"
    _at_0005(older)
    with closing(sqlite3.connect(older)) as db:
        db.execute("INSERT INTO user (id, created_at) VALUES ('u', '2026-01-01 00:00:00')")
        db.execute(
            "INSERT INTO login (id, user_id, token_hash, created_at, last_seen_at) "
            "VALUES ('l', 'u', 'h', '2026-01-01 00:00:00', '2026-01-01 00:00:00')"
        )
        db.commit()
    migrate.upgrade(older, tmp_path / "backups")
    with closing(sqlite3.connect(older)) as db:
        user = db.execute("SELECT name, is_operator, disabled_at FROM user").fetchall()
        logins = db.execute("SELECT agent, guest_id FROM login").fetchall()
    assert (user, logins) == ([(None, 0, None)], [("", None)])


def _at_0005(path: Path) -> None:
    db_engine = create_engine(f"sqlite:///{path}")
    config = migrate._config()
    with db_engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")
    db_engine.dispose()

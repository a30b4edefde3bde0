"""Users and their logins, assistants and their versions, chat lists, settings."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from sessions.account_records import NewLogin
from sessions.errors import NotFound
from sessions.queries import logins
from sessions.records import AssistantSeed, User
from sessions.repository import Repository

if TYPE_CHECKING:
    from tests.sessions.conftest import Chats

pytestmark = pytest.mark.anyio


async def test_user_is_found_by_a_valid_token_only(repository: Repository) -> None:
    user = await repository.create_user("first hash")
    other = await repository.create_user("other hash")
    assert user.created_at.utcoffset() == timedelta(0)
    assert await repository.user_by_token("first hash") == user
    assert await repository.user_by_token("unknown") is None
    assert await repository.rotate_login("first hash", NewLogin(token_hash="second hash")) == user
    assert await repository.user_by_token("first hash") is None
    assert await repository.user_by_token("second hash") == user
    assert await repository.rotate_login("first hash", NewLogin(token_hash="third hash")) is None
    assert await repository.revoke_login("second hash")
    assert not await repository.revoke_login("second hash")
    assert await repository.user_by_token("second hash") is None
    assert await repository.user_by_token("other hash") == other


async def test_visits_are_noted(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    await repository.create_user("hash")

    async def last_seen() -> object:
        async with repository._database.read() as db:
            login = await logins.login(db, "hash", datetime.now(UTC))
        assert login is not None
        return login.last_seen_at

    first = await last_seen()
    await repository.user_by_token("hash")
    assert await last_seen() == first, "not at every request"
    monkeypatch.setattr(logins, "SEEN_RESOLUTION", timedelta(0))
    await repository.user_by_token("hash")
    assert await last_seen() != first


async def test_changed_prompt_is_a_new_version_for_new_chats(
    repository: Repository, chats: Chats, user: User, seed: AssistantSeed
) -> None:
    old_turn = await chats.start("old")
    [assistant] = await repository.assistants(user.id)
    assert (assistant.slug, assistant.sampling) == ("helper", {"temperature": 0.25})
    old = await repository.assistant_version(assistant.id)
    assert (old.number, old.system_prompt) == (1, seed.system_prompt)

    renamed = dataclasses.replace(seed, name="New name", sampling={})
    await repository.sync_builtin_assistants([renamed])
    assert await repository.assistant_version(assistant.id) == old
    [changed] = await repository.assistants(user.id)
    assert (changed.id, changed.name, changed.sampling) == (assistant.id, "New name", {})

    prompted = dataclasses.replace(renamed, system_prompt="You help better.")
    for _ in range(2):
        await repository.sync_builtin_assistants([prompted])
        new = await repository.assistant_version(assistant.id)
        assert (new.number, new.system_prompt) == (2, "You help better.")
    prefix = await repository.prefix(new.id, "tokenizer", [20, 21])
    chat = await repository.chat(user.id, old_turn.chat_id)
    assert chat is not None
    assert (chat.assistant_version, chat.latest_version) == (1, 2)
    assert (await repository.prefix_by_id(chat.prefix_id)).token_ids == [10, 11, 12]
    new_chat = await repository.create_chat(user.id, prefix.id, "new")
    assert (new_chat.assistant_version, new_chat.latest_version) == (2, 2)
    assert new_chat.assistant_name == "New name"

    await repository.sync_builtin_assistants([seed])
    assert (await repository.assistant_version(assistant.id)).number == 3


async def test_order_and_withdrawal_of_builtins(
    repository: Repository, chats: Chats, seed: AssistantSeed
) -> None:
    turn = await chats.start()
    seeds = [dataclasses.replace(seed, slug=slug, name=slug) for slug in ("b", "a", "c")]
    await repository.sync_builtin_assistants(seeds)
    assert [one.slug for one in await repository.assistants(None)] == ["b", "a", "c"]
    chat = await repository.chat(chats.user.id, turn.chat_id)
    assert chat is not None
    assert chat.assistant_name == seed.name, "a withdrawn assistant keeps its chats"
    await repository.sync_builtin_assistants([*seeds, seed])
    back = [one for one in await repository.assistants(None) if one.slug == seed.slug]
    assert [one.id for one in back] == [chat.assistant_id]


async def test_prefix_is_frozen_by_version_and_tokenizer(
    repository: Repository, seed: AssistantSeed
) -> None:
    await repository.sync_builtin_assistants([seed])
    [assistant] = await repository.assistants(None)
    version = await repository.assistant_version(assistant.id)
    prefix = await repository.prefix(version.id, "one", [1, 2])
    assert await repository.prefix(version.id, "one", [9]) == prefix
    other = await repository.prefix(version.id, "two", [9])
    assert (other.id != prefix.id, other.token_ids) == (True, [9])
    assert await repository.prefix_by_id(prefix.id) == prefix
    with pytest.raises(NotFound, match="version"):
        await repository.prefix("0" * 32, "one", [1])
    with pytest.raises(NotFound, match="prefix"):
        await repository.prefix_by_id("0" * 32)
    with pytest.raises(NotFound, match="assistant"):
        await repository.assistant_version("0" * 32)


async def test_chats_are_the_users_own_and_latest_first(
    repository: Repository, chats: Chats, user: User
) -> None:
    stranger = await repository.create_user("stranger")
    turns = [await chats.start(f"{number}") for number in range(5)]
    theirs = await chats.start("theirs", user=stranger)
    await chats.answer(turns[1])
    titles = [chat.title for chat in await repository.chats(user.id)]
    assert titles == [f"title of {number}" for number in (1, 4, 3, 2, 0)]
    page = await repository.chats(user.id, limit=2)
    assert [chat.running for chat in page] == [False, True]
    rest = await repository.chats(user.id, limit=9, after=page[-1].cursor)
    assert [chat.title for chat in page + rest] == titles

    assert await repository.chat(user.id, theirs.chat_id) is None
    assert not await repository.rename_chat(user.id, theirs.chat_id, "mine now")
    assert not await repository.delete_chat(user.id, theirs.chat_id)
    [kept] = await repository.chats(stranger.id)
    assert kept.title == "title of theirs"
    assert await repository.rename_chat(user.id, turns[0].chat_id, " new <title> ")
    renamed = await repository.chat(user.id, turns[0].chat_id)
    assert renamed is not None
    assert renamed.title == " new <title> "

    assert await repository.turn(user.id, turns[0].id) is not None
    assert await repository.turn(stranger.id, turns[0].id) is None
    for message_id in (turns[0].user_message_id, turns[0].message_id):
        assert await repository.chat_of_message(user.id, message_id) == turns[0].chat_id
        assert await repository.chat_of_message(stranger.id, message_id) is None


async def test_settings_keep_their_first_value_when_told_to(repository: Repository) -> None:
    assert await repository.get_setting("secret") is None
    assert await repository.ensure_setting("secret", "first") == "first"
    assert await repository.ensure_setting("secret", "second") == "first"
    await repository.set_setting("secret", "third")
    assert await repository.get_setting("secret") == "third"

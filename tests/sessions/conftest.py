"""A database made by the migrations, copied for each test, and a chat's surroundings in it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sessions.database import Database
from sessions.migrate import upgrade
from sessions.records import AssistantSeed, Prefix, Turn, User
from sessions.repository import Repository


class Chats:
    """Makes chats and turns with as few words as a test wants to spend on them."""

    def __init__(self, repository: Repository, user: User, prefix: Prefix) -> None:
        self.repository = repository
        self.user = user
        self.prefix = prefix

    async def start(self, text: str = "question", *, user: User | None = None) -> Turn:
        [turn] = await self.repository.start_chat(
            (user or self.user).id,
            self.prefix.id,
            f"title of {text}",
            user_text=text,
            user_token_ids=[1, 2, 3],
            sampling={},
        )
        return turn

    async def ask(self, chat_id: str, parent_id: str | None, text: str = "question") -> Turn:
        [turn] = await self.repository.start_turns(
            chat_id, parent_id=parent_id, user_text=text, user_token_ids=[4, 5], sampling={}
        )
        return turn

    async def answer(self, turn: Turn, text: str = "answer") -> None:
        assert await self.repository.finish_turn(
            turn.id,
            status="complete",
            finish_reason="eos",
            error=None,
            text=text,
            token_ids=[7, 8],
            latency=None,
        )


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("migrated")
    upgrade(directory / "rejoinder.db", directory / "backups")
    return directory / "rejoinder.db"


@pytest.fixture
def db_path(migrated_database: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(migrated_database, tmp_path / "rejoinder.db"))


@pytest.fixture
async def database(db_path: Path) -> AsyncIterator[Database]:
    database = await Database.open(db_path)
    yield database
    await database.close()


@pytest.fixture
def repository(database: Database) -> Repository:
    return Repository(database)


@pytest.fixture
async def user(repository: Repository) -> User:
    return await repository.create_user("hash of the user's token")


@pytest.fixture
def seed() -> AssistantSeed:
    return AssistantSeed(
        slug="helper",
        name="Helper",
        description="Helps.",
        greeting="Hello.",
        system_prompt="You help.",
        sampling={"temperature": 0.25},
    )


@pytest.fixture
async def prefix(repository: Repository, seed: AssistantSeed) -> Prefix:
    await repository.sync_builtin_assistants([seed])
    [assistant] = await repository.assistants(None)
    version = await repository.assistant_version(assistant.id)
    return await repository.prefix(version.id, "tokenizer", [10, 11, 12])


@pytest.fixture
async def chats(repository: Repository, user: User, prefix: Prefix) -> Chats:
    return Chats(repository, user, prefix)

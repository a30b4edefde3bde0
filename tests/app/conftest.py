"""The application with a scripted engine and a database made by the migrations."""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.settings import Settings
from sessions.migrate import upgrade
from tests.app.fake_engine import FakeEngine, write_tokenizer
from tests.app.web_client import Browser, Server, serving, settings_for


@pytest.fixture(scope="session")
def web_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with an empty, current database and a model's tokenizer."""
    directory = tmp_path_factory.mktemp("web")
    upgrade(directory / "rejoinder.db", directory / "backups")
    write_tokenizer(directory / "model")
    return directory


@pytest.fixture
def web_settings(web_template: Path, tmp_path: Path) -> Settings:
    shutil.copy(web_template / "rejoinder.db", tmp_path / "rejoinder.db")
    return settings_for(tmp_path, web_template / "model")


@pytest.fixture
def fake_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def server(web_settings: Settings, fake_engine: FakeEngine) -> AsyncIterator[Server]:
    async with serving(web_settings, fake_engine) as running:
        yield running


@pytest.fixture
async def browser(server: Server) -> AsyncIterator[Browser]:
    async with server.browser() as browser:
        yield browser


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

"""A server that cannot start says why in one sentence and never listens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from litestar import Litestar

from app import main, server
from app.settings import Settings, load_settings
from engine.errors import ModelError
from tests.app.fake_engine import FakeEngine


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def serve(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Settings]
) -> None:
    """Run a server whose application fails at its start; `seen` gets the settings that it got."""

    @asynccontextmanager
    async def lifespan(_: Litestar) -> Any:
        raise fault
        yield

    def create_app(settings: Settings, **how: Any) -> Litestar:
        seen.append(settings)
        return Litestar(lifespan=[lifespan], openapi_config=None)

    monkeypatch.setattr(main, "create_app", create_app)
    settings = load_settings({"data_dir": str(tmp_path), "port": "0"})
    server.run_server(settings, FakeEngine())


def test_a_known_fault_is_raised_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match="the weights are of no use"):
        serve(ModelError("the weights are of no use"), tmp_path, monkeypatch, [])
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert "serves on" not in captured.out


def test_an_unknown_fault_is_logged_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Settings] = []
    with pytest.raises(SystemExit):
        serve(RuntimeError("a defect"), tmp_path, monkeypatch, seen)
    (settings,) = seen
    assert settings.data_dir == tmp_path
    captured = capfd.readouterr()
    assert "RuntimeError: a defect" in captured.out + captured.err
    assert "serves on" not in captured.out

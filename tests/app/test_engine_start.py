"""The engine's start, and its end when nobody takes the engine."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from app import engine_start
from app.engine_start import EngineStart
from app.settings import Settings, load_settings
from engine.client import EngineClient
from engine.connection import EngineProcess
from engine.errors import ModelError

pytestmark = pytest.mark.anyio

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
async def settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, embedded_model: Path
) -> AsyncIterator[Settings]:
    """Of a server whose engine is a scripted one; none of its processes may be left."""
    monkeypatch.chdir(REPOSITORY)
    command = (sys.executable, "-m", "tests.engine.scripted_engine")
    monkeypatch.setattr(engine_start, "DEFAULT_COMMAND", command)
    yield load_settings({"data_dir": str(tmp_path), "model": str(embedded_model), "threads": "1"})
    assert scripted() == []


def scripted() -> list[int]:
    """Engine processes of this test process."""
    return [
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "scripted_engine" in str(child.cmdline())
    ]


async def test_the_process_starts_before_the_model_is_verified(
    settings: Settings, embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned, let_go = asyncio.Event(), threading.Event()
    spawn = EngineProcess.spawn

    async def seen(command: list[str]) -> EngineProcess:
        process = await spawn(command)
        spawned.set()
        return process

    def verify(*_: object) -> Path:
        let_go.wait()
        return embedded_model

    monkeypatch.setattr(EngineProcess, "spawn", seen)
    monkeypatch.setattr(engine_start, "resolve_model", verify)
    start = EngineStart(settings)
    await spawned.wait()
    assert len(scripted()) == 1
    let_go.set()
    assert await start.model_dir() == embedded_model
    engine = await start.engine()
    assert isinstance(engine, EngineClient)
    assert engine.alive
    await start.close()
    assert not engine.alive
    await start.close()


async def test_a_model_that_is_no_good_ends_the_process(settings: Settings, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    start = EngineStart(settings.model_copy(update={"model": str(bad)}))
    with pytest.raises(ModelError, match=r"config\.json"):
        await start.model_dir()
    with pytest.raises(ModelError, match=r"config\.json"):
        await start.engine()
    await start.close()


async def test_a_start_that_nobody_waits_for_is_ended(settings: Settings) -> None:
    start = EngineStart(settings)
    while not scripted():
        await asyncio.sleep(0)
    await start.close()

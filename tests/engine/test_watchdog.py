"""An engine process that lives and makes no progress is found, killed and started again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import engine.client
from engine.client import EngineClient, TurnStream
from engine.config import EngineConfig
from engine.errors import EngineUnavailable
from engine.messages import Delta, Done, Failed, SamplingParams, Submit

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, "-m", "tests.engine.scripted_engine")
WATCHDOG_S = 1.0


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(engine.client, "RESTART_DELAYS_S", (0.05,))
    config = EngineConfig(model_dir="", model_name="scripted")
    client = await EngineClient.start(config, command=COMMAND, watchdog_s=WATCHDOG_S)
    yield client
    await client.close(limit_s=2.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def submit(client: EngineClient, request_id: str, chat_id: str) -> TurnStream:
    turn = Submit(
        request_id=request_id,
        chat_id=chat_id,
        prefix_ids=[],
        history_ids=[],
        history_computed=0,
        new_ids=[1, 2, 3],
        sampling=SamplingParams(),
    )
    return client.submit(turn, client.reserve())


async def end_of(stream: TurnStream) -> Done | Failed:
    last: Done | Failed | None = None
    async for event in stream:
        if isinstance(event, Done | Failed):
            last = event
    assert last is not None
    return last


async def ids_of(stream: TurnStream) -> list[int]:
    return [
        token async for event in stream if isinstance(event, Delta) for token in event.token_ids
    ]


@pytest.mark.parametrize("how", ["stopped", "stuck in a step"])
async def test_a_process_without_progress_is_replaced(
    client: EngineClient, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = client.pid
    assert before is not None
    deaths: list[int] = []
    client.on_death(lambda: deaths.append(1))
    if how == "stopped":
        stream = submit(client, "r1", "hold")
        await anext(stream)
        os.kill(before, signal.SIGSTOP)
    else:
        stream = submit(client, "r1", "stuck")
    with caplog.at_level(logging.ERROR, "engine.client"):
        async with asyncio.timeout(20):
            end = await end_of(stream)
    assert isinstance(end, Failed)
    assert end.kind == "engine_died"
    assert "made no progress for 1 s" in end.reason
    assert f"process {before} made no progress for 1 s, with 1 answers running" in caplog.text
    await until(lambda: client.alive and client.pid != before)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert await ids_of(submit(client, "r2", "echo")) == [1, 2, 3]
    assert deaths == [1]
    caplog.clear()


async def test_work_that_goes_on_is_no_standstill(client: EngineClient) -> None:
    before = client.pid
    stream = submit(client, "r1", "hold")  # steps for ever and says nothing
    await asyncio.sleep(2.5 * WATCHDOG_S)
    assert (client.pid, stream.ended) == (before, False)
    await client.cancel("r1")
    assert isinstance(await end_of(stream), Done)


async def test_a_stop_is_answered_though_the_engine_does_not(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.client, "STOP_LIMIT_S", 0.2)
    pid = client.pid
    assert pid is not None
    stream = submit(client, "r1", "hold")
    await anext(stream)
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(0.8):
        await client.cancel("r1")
    end = await end_of(stream)
    assert isinstance(end, Failed)
    assert "did not confirm the stop" in end.reason
    os.kill(pid, signal.SIGCONT)
    # The late confirmation is nobody's any more, and its place is free.
    assert await ids_of(submit(client, "r2", "echo")) == [1, 2, 3]
    assert (await client.stats()).running == 0
    assert client.pid == pid


async def test_an_engine_that_is_away_is_told_as_such(client: EngineClient) -> None:
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not client.alive)
    with pytest.raises(EngineUnavailable):
        await client.stats()
    await until(lambda: client.alive)

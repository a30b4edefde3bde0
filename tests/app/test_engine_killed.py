"""The engine process is killed while it saves and while it restores: answers stay right (fp32).

Oracle: transformers' own generation over the same ids.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import engine.client
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineUnavailable
from engine.messages import Delta, Done, FromEngine, SamplingParams, Status, Submit
from engine.turn_stream import TurnStream
from sessions.chunks import check
from tests.engine.harness import Oracle, make_tiny_model, random_ids

pytestmark = pytest.mark.anyio

ANSWER = 12
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_kv_heads=2)


class Killable:
    """An engine process, and turns that may be the last thing that it does."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._serial = 0

    def submit(self, chat: str, history: list[int], new: list[int]) -> TurnStream:
        self._serial += 1
        submit = Submit(
            request_id=f"r{self._serial}",
            chat_id=chat,
            prefix_ids=[],
            history_ids=history,
            history_computed=max(0, len(history) - 1),
            new_ids=new,
            sampling=SamplingParams(temperature=0.0, max_tokens=ANSWER),
        )
        return self.client.submit(submit, self.client.reserve())

    async def answer(self, chat: str, history: list[int], new: list[int]) -> tuple[list[int], Done]:
        ids: list[int] = []
        async with asyncio.timeout(LIMIT_S):
            async for event in self.submit(chat, history, new):
                if isinstance(event, Delta):
                    ids += event.token_ids
                elif isinstance(event, Done):
                    return ids, event
                else:
                    assert isinstance(event, Status), event
        raise AssertionError("the turn had no end")

    async def kill_when(self, stream: TurnStream, due: Callable[[FromEngine], bool]) -> None:
        """Kill the process at a turn's first event that is `due`, and wait for the next process."""
        pid = self.client.pid
        assert pid is not None
        async with asyncio.timeout(LIMIT_S):
            async for event in stream:
                if due(event):
                    os.kill(pid, signal.SIGKILL)
                    break
            else:
                raise AssertionError("the turn ended before")
            while not self.client.alive or self.client.pid == pid:
                await asyncio.sleep(0.02)

    async def saved(self, stripes: int) -> None:
        """Wait until so many stripes are durable."""
        async with asyncio.timeout(LIMIT_S):
            while (await self.client.stats()).stripes_written < stripes:
                await asyncio.sleep(0.02)


@pytest.fixture
async def killable(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Killable]:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(engine.client, "RESTART_DELAYS_S", (0.05,))
    config = EngineConfig(
        model_dir=str(model),
        model_name="tiny",
        dtype="fp32",
        kv_memory_bytes=64 << 20,
        checkpoint_method="hidden",
        checkpoint_dirs=(str(tmp_path / "chunks"),),
        checkpoint_cap_bytes=1 << 30,
        num_threads=1,
        prefill_chunk=16,  # a prompt takes long enough to be killed in the middle of it
    )
    client = await EngineClient.start(config)
    yield Killable(client)
    await client.close()


async def test_killed_in_a_save_and_in_a_restore(
    killable: Killable, model: Path, tmp_path: Path
) -> None:
    oracle = Oracle(model)
    first, other, new = random_ids(3500, 1), random_ids(300, 2), random_ids(9, 3)

    answered, _ = await killable.answer("other", [], other)
    other += answered
    await killable.saved(len(other) // 64 + 1)

    def half_read(event: FromEngine) -> bool:
        return isinstance(event, Status) and event.phase == "reading" and event.done > 700

    await killable.kill_when(killable.submit("chat", [], first), half_read)
    stream = killable.submit("chat", [], first)
    answered = []

    def ended(event: FromEngine) -> bool:
        if isinstance(event, Delta):
            answered.extend(event.token_ids)
        return isinstance(event, Done)  # its last stripe is on its way to the disk

    await killable.kill_when(stream, ended)
    assert answered == oracle.greedy(first, ANSWER)

    history = first + answered
    expected = oracle.greedy(history + new, ANSWER)

    def restoring(event: FromEngine) -> bool:
        return isinstance(event, Status) and event.phase == "restoring"

    await killable.kill_when(killable.submit("chat", history, new), restoring)
    ids, end = await killable.answer("chat", history, new)
    assert ids == expected
    assert end.stats.restored_tokens > 1000
    assert end.stats.restored_tokens + end.stats.recomputed_tokens == len(history) - 1
    # the other chat had no part in any of it
    ids, end = await killable.answer("other", other, new)
    assert ids == oracle.greedy(other + new, ANSWER)
    assert end.stats.restored_tokens == len(other) - 1
    assert end.stats.recomputed_tokens == 0

    await killable.client.close()
    assert check([tmp_path / "chunks"]).problems == []


async def test_weights_that_cannot_be_read_when_the_engine_is_started_again(
    killable: Killable, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Told in the log and to who asks, tried again, and back as soon as they can be read."""
    weights = model / "model.safetensors"
    away = weights.rename(weights.with_suffix(".away"))
    pid = killable.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        while "could not be started again" not in caplog.text:
            await asyncio.sleep(0.05)
    assert "safetensors" in caplog.text
    with pytest.raises(EngineUnavailable):
        killable.client.reserve()
    with pytest.raises(EngineUnavailable):
        await killable.client.stats()
    away.rename(weights)
    async with asyncio.timeout(LIMIT_S):
        while not killable.client.alive:
            await asyncio.sleep(0.05)
    asked = random_ids(50, 9)
    ids, _ = await killable.answer("chat", [], asked)
    assert ids == Oracle(model).greedy(asked, ANSWER)

"""The client with a real process behind it that runs the real loop and a scripted engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import engine.client
from engine.client import EngineClient, TurnStream
from engine.config import EngineConfig
from engine.errors import EngineError, EngineUnavailable, ModelError, QueueFull
from engine.framing import FrameSplitter, frame, to_engine_decoder
from engine.messages import Delta, Done, Failed, GetStats, SamplingParams, Status, Submit, Warm

pytestmark = pytest.mark.anyio

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "tests.engine.scripted_engine")

Start = Callable[..., Awaitable[EngineClient]]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts clients of the scripted engine, and checks that none of their processes is left."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(engine.client, "RESTART_DELAYS_S", (0.05,))
    clients: list[EngineClient] = []

    async def start_client(model_dir: str = "", **config: Any) -> EngineClient:
        settings = EngineConfig(model_dir=model_dir, model_name="scripted", **config)
        client = await EngineClient.start(settings, command=COMMAND)
        clients.append(client)
        return client

    yield start_client
    for client in clients:
        await client.close(limit_s=2.0)
    assert children() == set()


def children() -> set[int]:
    """Engine processes of this test process."""
    return {
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "scripted_engine" in str(child.cmdline())
    }


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def turn(request_id: str, chat_id: str = "echo", ids: list[int] | None = None) -> Submit:
    return Submit(
        request_id=request_id,
        chat_id=chat_id,
        prefix_ids=[],
        history_ids=[],
        history_computed=0,
        new_ids=[1, 2, 3] if ids is None else ids,
        sampling=SamplingParams(),
    )


def submit(client: EngineClient, *args: Any, **options: Any) -> TurnStream:
    return client.submit(turn(*args, **options), client.reserve())


async def collect(stream: TurnStream) -> tuple[list[int], str, Done | Failed]:
    """Ids, text and end of a turn."""
    ids: list[int] = []
    text = ""
    last: Done | Failed | None = None
    async for event in stream:
        assert last is None, "nothing follows the end"
        match event:
            case Delta():
                ids += event.token_ids
                text += event.text
            case Done() | Failed():
                last = event
    assert last is not None
    return ids, text, last


async def test_a_turn_streams_its_events_in_order(start: Start) -> None:
    client = await start()
    assert client.alive
    assert client.info.model_name == "scripted"
    stream = submit(client, "r1")
    first = await anext(stream)
    assert isinstance(first, Status)
    ids, text, end = await collect(stream)
    assert (ids, text) == ([1, 2, 3], "1 2 3 ")
    assert isinstance(end, Done)
    assert end.finish == "eos"


async def test_turns_run_side_by_side(start: Start) -> None:
    client = await start()
    streams = [submit(client, f"r{n}", ids=list(range(n, n + 50))) for n in range(40)]
    for n, (ids, _, _) in enumerate(await asyncio.gather(*map(collect, streams))):
        assert ids == list(range(n, n + 50))


async def test_cancel_returns_when_the_engine_confirmed(start: Start) -> None:
    client = await start()
    stream = submit(client, "r1", "hold")
    assert (await client.stats()).running == 1
    await client.cancel("r1")
    assert stream.ended
    assert (await client.stats()).running == 0
    _, _, end = await collect(stream)
    assert isinstance(end, Done)
    assert end.finish == "cancelled"
    await client.cancel("r1")
    await client.cancel("unknown")


async def test_places_are_counted_and_given_back_once(start: Start) -> None:
    client = await start(max_batch=1, max_queue=1)
    first, second = client.reserve(), client.reserve()
    with pytest.raises(QueueFull) as full:
        client.reserve()
    assert full.value.limit == 2
    assert full.value.retry_after_s >= 1
    first.release()
    first.release()
    third = client.reserve()
    with pytest.raises(QueueFull):
        client.reserve()
    await collect(client.submit(turn("r1"), second))
    with client.reserve(), pytest.raises(QueueFull):
        client.reserve()
    third.release()
    with client.reserve(), client.reserve():
        pass


async def test_misuse_is_refused(start: Start) -> None:
    client = await start()
    submit(client, "r1", "hold")
    with client.reserve() as reservation:
        with pytest.raises(ValueError, match="r1 is running already"):
            client.submit(turn("r1"), reservation)
        reservation.release()
        with pytest.raises(ValueError, match="released"):
            client.submit(turn("r2"), reservation)


async def test_warm_and_forget(start: Start) -> None:
    client = await start()
    await client.warm(Warm(chat_id="c", prefix_ids=[], history_ids=[]))
    assert (await client.stats()).resident_chats == 1
    await client.forget(["a", "b"])
    with pytest.raises(EngineError, match="internal error"):
        await client.forget(["unlucky"])
    await client.forget(["a"])


async def test_large_messages_pass_both_ways(start: Start) -> None:
    client = await start()
    ids, _, _ = await collect(submit(client, "r1", "echo", [7] * 3000))
    assert len(ids) == 3000
    big = turn("r2", "large", [20_000_000, *[7] * 500_000])
    _, text, end = await collect(client.submit(big, client.reserve()))
    assert len(text) == 20_000_000
    assert isinstance(end, Done)


async def test_a_reader_that_does_not_read_holds_up_nobody(start: Start) -> None:
    client = await start()
    stream = submit(client, "r1", ids=list(range(5000)))
    await stream.wait_ended()
    assert (await client.stats()).running == 0
    ids, _, _ = await collect(stream)
    assert ids == list(range(5000))


async def test_a_busy_event_loop_does_not_hold_up_the_engine(start: Start) -> None:
    client = await start()
    stream = submit(client, "r1", "large", ids=[20_000_000])
    await anext(stream)
    time.sleep(1.5)
    _, text, end = await collect(stream)
    assert len(text) == 20_000_000
    assert isinstance(end, Done)
    # Far more than the socket holds was sent meanwhile, and the engine did not wait for it.
    assert end.stats.total_ms < 1000


@pytest.mark.parametrize("chat_id", ["raise", "raise at once"])
async def test_an_exception_fails_what_runs_and_the_loop_lives(start: Start, chat_id: str) -> None:
    client = await start()
    pid = client.pid
    for attempt in range(3):
        _, _, end = await collect(submit(client, f"r{attempt}", chat_id))
        assert isinstance(end, Failed)
        assert end.kind == "internal"
        assert "internal error" in end.reason
        _, _, end = await collect(submit(client, f"s{attempt}"))
        assert isinstance(end, Done)
    assert client.pid == pid


async def test_an_engine_that_only_fails_is_started_again(start: Start) -> None:
    client = await start()
    pid = client.pid
    for attempt in range(5):
        await collect(submit(client, f"r{attempt}", "raise"))
    await until(lambda: client.alive and client.pid != pid)


async def test_death_fails_running_turns_and_the_engine_comes_back(start: Start) -> None:
    client = await start(max_batch=2, max_queue=1)
    deaths: list[bool] = []
    held = submit(client, "r1", "hold")
    client.on_death(lambda: deaths.append(held.ended and not client.alive))
    first_pid = client.pid
    waiting = asyncio.create_task(client.forget(["a"]))
    dying = submit(client, "r2", "die")
    for stream in (held, dying):
        _, _, end = await collect(stream)
        assert isinstance(end, Failed)
        assert end.kind == "engine_died"
    await asyncio.wait([waiting])
    assert waiting.exception() is None or isinstance(waiting.exception(), EngineUnavailable)
    await until(lambda: deaths == [True])
    await until(lambda: client.alive)
    assert client.pid != first_pid
    with client.reserve(), client.reserve(), client.reserve():  # all places are free again
        pass
    _, text, _ = await collect(submit(client, "r1"))
    assert text == "1 2 3 "


async def test_while_the_engine_is_down_callers_are_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await start()
    monkeypatch.setattr(engine.client, "RESTART_DELAYS_S", (30.0,))
    reservation = client.reserve()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: not client.alive)
    with pytest.raises(EngineUnavailable):
        client.reserve()
    with pytest.raises(EngineUnavailable):
        await client.stats()
    await client.warm(Warm(chat_id="c", prefix_ids=[], history_ids=[]))
    await client.cancel("r1")
    _, _, end = await collect(client.submit(turn("r1"), reservation))
    assert isinstance(end, Failed)
    assert end.kind == "engine_died"
    assert not reservation.held


@pytest.mark.parametrize(
    ("mode", "error", "reason"),
    [
        ("fatal", ModelError, "there is no such model"),
        ("crash", ModelError, "could not start: RuntimeError: a bug"),
        ("exit", EngineUnavailable, "code 7"),
    ],
)
async def test_an_engine_that_cannot_start_says_why(
    start: Start, mode: str, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        await start(mode)
    assert children() == set()


async def test_a_start_that_is_given_up_leaves_no_process(start: Start) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.7):
            await start("slow start")
    assert children() == set()


async def test_close_lets_the_engine_flush(start: Start, tmp_path: Path) -> None:
    client = await start(checkpoint_dirs=(str(tmp_path),))
    pid = client.pid
    stream = submit(client, "r1", "hold")
    await client.close()
    assert (tmp_path / "flushed").exists()
    assert not client.alive
    assert pid not in children()
    _, _, end = await collect(stream)
    assert isinstance(end, Failed)
    await client.close()


async def test_close_kills_an_engine_that_does_not_end(start: Start) -> None:
    client = await start("slow end")
    began = time.monotonic()
    await client.close(limit_s=0.5)
    assert time.monotonic() - began < 3
    assert children() == set()


async def test_interrupts_are_left_to_the_app_and_sigterm_flushes(
    start: Start, tmp_path: Path
) -> None:
    client = await start(checkpoint_dirs=(str(tmp_path),))
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    await asyncio.sleep(0.1)
    await client.stats()
    assert client.pid == pid
    stream = submit(client, "r1", "hold")
    os.kill(pid, signal.SIGTERM)
    # The engine ends its turns as cancelled, but nobody pressed Stop.
    _, _, end = await collect(stream)
    assert isinstance(end, Failed)
    assert end.kind == "engine_died"
    await until(lambda: client.alive and client.pid != pid)
    assert (tmp_path / "flushed").exists()


APP = """
import asyncio, sys
from engine.client import EngineClient
from engine.config import EngineConfig
from tests.engine.test_client import COMMAND, submit

async def main():
    config = EngineConfig(model_dir="", model_name="", checkpoint_dirs=(sys.argv[2],))
    client = await EngineClient.start(config, command=COMMAND)
    if sys.argv[1] != "idle":
        stream = submit(client, "r1", sys.argv[1])
        await anext(stream)
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(("busy", "flushes"), [("idle", True), ("hold", True), ("stuck", False)])
async def test_no_engine_outlives_a_killed_app(tmp_path: Path, busy: str, flushes: bool) -> None:
    app = subprocess.Popen(
        [sys.executable, "-c", APP, busy, str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
    )
    with app:
        assert app.stdout is not None
        pid = int(app.stdout.readline())
        assert psutil.pid_exists(pid)
        app.kill()
        await until(lambda: not running(pid))
    assert (tmp_path / "flushed").exists() == flushes


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_survive_any_cut(size: int) -> None:
    messages = [turn("r1", ids=list(range(300))), GetStats(call_id=5), turn("é" * 50)]
    stream = b"".join(map(frame, messages))
    splitter = FrameSplitter()
    bodies = [
        body
        for start in range(0, len(stream), size)
        for body in splitter.feed(stream[start : start + size])
    ]
    assert [to_engine_decoder.decode(body) for body in bodies] == messages
    with pytest.raises(ValueError, match="limit"):
        splitter.feed(b"\xff\xff\xff\xff")

"""An engine that plays a script, served by the real loop: the chat id says what happens."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

import engine.process
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.messages import (
    Cancel,
    Delta,
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    FinishReason,
    Forget,
    Forgotten,
    GetStats,
    Stats,
    Status,
    Submit,
    ToEngine,
    TurnStats,
    Warm,
)
from engine.process import Emit, serve

INFO = EngineInfo(
    model_name="scripted",
    family="llama",
    dtype="fp32",
    weights="fp32",
    num_layers=1,
    context_length=100,
    vocab_size=256,
    page_size=64,
    num_pages=4,
    bytes_per_token_kv=8,
    bytes_per_token_checkpoint=8,
    checkpoint_method="kv",
    checkpoint_reason="scripted",
    fingerprint="00",
    load_ms=1.0,
)


def turn_stats(*, total_ms: float = 0.0, tokens_out: int = 0) -> TurnStats:
    return TurnStats(
        queue_ms=0.0,
        restore_ms=0.0,
        restore_io_ms=0.0,
        restore_compute_ms=0.0,
        restore_method="",
        restore_bytes=0,
        prefill_ms=0.0,
        ttft_ms=0.0,
        itl_p50_ms=None,
        itl_p95_ms=None,
        total_ms=total_ms,
        tokens_in=0,
        tokens_out=tokens_out,
        prefix_tokens=0,
        resident_tokens=0,
        restored_tokens=0,
        recomputed_tokens=0,
        new_tokens=0,
        batch_size=1.0,
    )


class ScriptedEngine:
    """Answers each token id of the turn's new ids with one token, or does what the chat id says.

    `hold` never ends, `die` kills the process, `raise` fails in its step, `stuck` never returns
    from it, `large` answers with a text as long as its only id says.
    """

    info = INFO

    def __init__(self, config: EngineConfig, emit: Emit) -> None:
        self._config = config
        self._emit = emit
        self._running: dict[str, tuple[Submit, float, int]] = {}
        self._steps = 0
        self._warmed = 0
        match config.model_dir:
            case "fatal":
                raise ModelError("there is no such model")
            case "crash":
                raise RuntimeError("a bug")
            case "exit":
                os._exit(7)
            case "slow start":
                time.sleep(60)

    def handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                if message.chat_id == "raise at once":
                    raise RuntimeError("scripted")
                self._running[message.request_id] = (message, time.monotonic(), 0)
                self._emit(Status(request_id=message.request_id, phase="queued"))
            case Cancel():
                self._finish(message.request_id, "cancelled")
            case Warm():
                self._warmed += 1
            case Forget():
                if "unlucky" in message.chat_ids:
                    raise OSError("scripted")
                self._emit(Forgotten(call_id=message.call_id))
            case GetStats():
                self._emit(Stats(call_id=message.call_id, stats=self._stats()))

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> None:
        self._steps += 1
        for request_id, (turn, began, done) in list(self._running.items()):
            match turn.chat_id:
                case "hold":
                    time.sleep(0.001)
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "raise":
                    raise RuntimeError("scripted")
                case "stuck":
                    time.sleep(60)
                case "large":
                    text = "x" * turn.new_ids[0]
                    self._emit(Delta(request_id=request_id, token_ids=[1], text=text))
                    self._finish(request_id, "length")
                case _:
                    token_id = turn.new_ids[done]
                    self._running[request_id] = (turn, began, done + 1)
                    self._emit(
                        Delta(request_id=request_id, token_ids=[token_id], text=f"{token_id} ")
                    )
                    if done + 1 == len(turn.new_ids):
                        self._finish(request_id, "eos")

    def idle_wait(self) -> float | None:
        return None

    def idle_tick(self) -> None:
        raise AssertionError("idle_wait never asks for it")

    def fail_all(self, reason: str) -> None:
        for request_id in self._running:
            self._emit(Failed(request_id=request_id, kind="internal", reason=reason))
        self._running.clear()

    def close(self) -> None:
        if self._config.model_dir == "slow end":
            time.sleep(60)
        for request_id in list(self._running):
            self._finish(request_id, "cancelled")
        for directory in self._config.checkpoint_dirs:
            (Path(directory) / "flushed").touch()

    def _finish(self, request_id: str, finish: FinishReason) -> None:
        if (entry := self._running.pop(request_id, None)) is not None:
            _, began, done = entry
            stats = turn_stats(total_ms=(time.monotonic() - began) * 1e3, tokens_out=done)
            self._emit(Done(request_id=request_id, finish=finish, stats=stats))

    def _stats(self) -> EngineStats:
        counts: dict[str, Any] = {
            one.name: 0 for one in msgspec.structs.fields(EngineStats) if one.required
        }
        counts |= {"running": len(self._running), "steps": self._steps}
        counts |= {"resident_chats": self._warmed}
        return EngineStats(**counts)


if __name__ == "__main__":
    engine.process.ORPHAN_LIMIT_S = 1.0
    with socket.socket(fileno=int(sys.argv[-1])) as sock:
        sys.exit(serve(ScriptedEngine, sock))

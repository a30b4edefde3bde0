"""An engine that does what a test scripts, and a tokenizer directory of 256 byte tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import EngineUnavailable
from engine.messages import (
    Delta,
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    FailureKind,
    FinishReason,
    Phase,
    PrefixUse,
    Status,
    Submit,
    TurnEvent,
    TurnStats,
    Warm,
)
from engine.turn_stream import Places, Reservation, TurnStream

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = {"<|im_start|>": 256, "<|im_end|>": 257}


def write_tokenizer(directory: Path) -> Path:
    """A model directory as far as the web application looks at one: each byte is one token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in names]
    names |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, token_id in CONTROL_TOKENS.items()
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "vocab": {names[byte]: byte for byte in range(256)} | CONTROL_TOKENS,
            "merges": [],
        },
    }
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text("{}")
    return directory


def stats(**changes: object) -> TurnStats:
    """A latency record of a returning chat."""
    values: dict[str, object] = {
        "queue_ms": 1.0,
        "restore_ms": 38.2,
        "restore_io_ms": 20.0,
        "restore_compute_ms": 15.0,
        "restore_method": "kv",
        "restore_bytes": 4096,
        "prefill_ms": 9.0,
        "ttft_ms": 60.0,
        "itl_p50_ms": 20.0,
        "itl_p95_ms": 31.0,
        "total_ms": 500.0,
        "tokens_in": 2300,
        "tokens_out": 3,
        "prefix_tokens": 1012,
        "resident_tokens": 64,
        "restored_tokens": 1204,
        "recomputed_tokens": 0,
        "new_tokens": 20,
        "batch_size": 2.5,
        "restore_plan": "3 recompute + 1 hidden + 26 kv",
        "restore_predicted_ms": 36.4,
    }
    return TurnStats(**(values | changes))  # type: ignore[arg-type]


@dataclass
class FakeTurn:
    """One submitted turn; the test says what the engine does with it."""

    submit: Submit
    stream: TurnStream
    reservation: Reservation

    def status(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        self._push(Status(request_id=self.stream.request_id, phase=phase, done=done, total=total))

    def say(self, text: str) -> None:
        """Each byte of the text is one token."""
        self.push_ids(list(text.encode()), text)

    def push_ids(self, ids: list[int], text: str) -> None:
        """Tokens, and the text that became certain with them."""
        self._push(Delta(request_id=self.stream.request_id, token_ids=ids, text=text))

    def end(self, finish: FinishReason = "eos", **changes: object) -> None:
        self.reservation.release()
        self._push(Done(request_id=self.stream.request_id, finish=finish, stats=stats(**changes)))

    def fail(self, kind: FailureKind = "internal", reason: str = "A page was lost.") -> None:
        self.reservation.release()
        self._push(Failed(request_id=self.stream.request_id, kind=kind, reason=reason))

    def _push(self, event: TurnEvent) -> None:
        self.stream.push(event)


@dataclass
class FakeEngine:
    """The `Engine` protocol, scripted. With `auto` it answers each turn at once with that text."""

    context_length: int = 30_000
    places: Places = field(default_factory=lambda: Places(4))
    auto: str | None = None
    alive: bool = True
    turns: list[FakeTurn] = field(default_factory=list)
    warmed: list[Warm] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    collected: list[list[str]] = field(default_factory=list)
    step_age_ms: float = 3.0
    stats_hang: bool = False
    write_trouble: str = ""
    prefixes: list[PrefixUse] = field(default_factory=list)
    closed: bool = False
    _submitted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model_name="fake",
            family="llama",
            dtype="fp32",
            weights="fp32",
            num_layers=2,
            context_length=self.context_length,
            vocab_size=258,
            page_size=64,
            num_pages=100,
            bytes_per_token_kv=8,
            bytes_per_token_checkpoint=8,
            checkpoint_method="kv",
            checkpoint_reason="KV is smaller than hidden states here.",
            fingerprint="f",
            load_ms=1.0,
        )

    def reserve(self) -> Reservation:
        if not self.alive:
            raise EngineUnavailable("the engine is not running; it is being started again")
        return self.places.take()

    def submit(self, turn: Submit, reservation: Reservation) -> TurnStream:
        assert reservation.held
        made = FakeTurn(turn, TurnStream(turn.request_id), reservation)
        self.turns.append(made)
        self._submitted.set()
        if self.auto is not None:
            made.say(self.auto)
            made.end()
        return made.stream

    async def next_turn(self, number: int) -> FakeTurn:
        """The turn with this number, as soon as it is submitted."""
        while len(self.turns) <= number:
            self._submitted.clear()
            async with asyncio.timeout(5):
                await self._submitted.wait()
        return self.turns[number]

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        for turn in self.turns:
            if turn.stream.request_id == request_id and not turn.stream.ended:
                turn.end("cancelled")

    def die(self) -> None:
        self.alive = False
        for turn in self.turns:
            if not turn.stream.ended:
                turn.fail("engine_died", "The engine stopped while it worked on this answer.")

    async def warm(self, warm: Warm) -> None:
        self.warmed.append(warm)

    async def forget(self, chat_ids: Sequence[str]) -> None:
        if not self.alive:
            raise EngineUnavailable("the engine is not running")
        self.forgotten.extend(chat_ids)

    async def collect(self, owners: Sequence[str]) -> None:
        if not self.alive:
            raise EngineUnavailable("the engine is not running")
        self.collected.append(list(owners))

    async def stats(self) -> EngineStats:
        if not self.alive:
            raise EngineUnavailable("the engine is not running")
        if self.stats_hang:
            await asyncio.Event().wait()
        zeros: dict[str, Any] = {
            field.name: 0 for field in msgspec.structs.fields(EngineStats) if field.required
        }
        zeros |= {"last_step_age_ms": self.step_age_ms, "prefixes": tuple(self.prefixes)}
        return EngineStats(**zeros, write_trouble=self.write_trouble)

    def on_death(self, callback: Callable[[], None]) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

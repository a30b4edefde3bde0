"""One server's life as the benchmark sees it: a chat is saved, the engine ends, it comes back."""

from __future__ import annotations

import itertools
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from benchmarks.agreement import check_logits
from benchmarks.machine import drop_from_page_cache
from benchmarks.report import Refused
from benchmarks.throttle import ThrottledStore
from engine.config import CheckpointMethod, EngineConfig
from engine.engine import Engine
from engine.messages import Delta, Done, Failed, FromEngine, SamplingParams, Submit, TurnStats
from engine.request import Request
from engine.restoration.chunk_store import ChunkStore
from sessions.chunks import ChunkStore as DiskStore

CHAT = "returning"
ANSWER_TOKENS = 8  # compared, token by token, with those of a chat that was never evicted
SPARE_TOKENS = 512  # of memory: the other chat, and pages that are not full


@dataclass(frozen=True)
class Chat:
    """Token ids of the chat that leaves and comes back."""

    prefix: list[int]
    history: list[int]
    new: list[int]


@dataclass(frozen=True)
class Turn:
    """What one turn answered, and what it took."""

    ids: list[int]
    logits: Tensor  # fp32 [answered, vocab_size]
    stats: TurnStats
    restore_s: float  # until the history has K/V again, however they came back

    @property
    def ttft_ms(self) -> float:
        """To the first token. Raises Refused when the turn had none."""
        if self.stats.ttft_ms is None:
            raise Refused("a returning turn had no first token")
        return self.stats.ttft_ms


class ObservedEngine(Engine):
    """An engine that keeps the logits that it samples from. Driven by one thread, by hand."""

    def __init__(self, config: EngineConfig, store: ChunkStore | None) -> None:
        self.logits: list[Tensor] = []
        self.events: list[FromEngine] = []
        self.serials = itertools.count()
        super().__init__(config, store, self.events.append)

    def _answer(self, requests: list[Request], logits: Tensor) -> None:
        if requests:
            self.logits.append(logits.clone())
        super()._answer(requests, logits)

    def turn(self, chat_id: str, prefix: list[int], history: list[int], new: list[int]) -> Turn:
        """Run one turn of one chat to its end, with nothing beside it."""
        self.events.clear()
        self.logits.clear()
        request_id = f"r{next(self.serials)}"
        began = time.perf_counter()
        self.handle(
            Submit(
                request_id=request_id,
                chat_id=chat_id,
                prefix_ids=prefix,
                history_ids=history,
                history_computed=len(history),
                new_ids=new,
                sampling=SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS),
            )
        )
        restored_at: float | None = None
        while self.has_work():
            self.step()
            running = [r for r in self.scheduler.running if r.id == request_id]
            computed = running[0].sequence.num_computed if running else len(history)
            if restored_at is None and computed >= len(history):
                restored_at = time.perf_counter()
        end = self.events[-1]
        if isinstance(end, Failed):
            raise Refused(f"a turn failed: {end.reason}")
        assert isinstance(end, Done), f"the turn ended with {end}"
        assert restored_at is not None, "a turn ended before its history was there"
        ids = [token for e in self.events if isinstance(e, Delta) for token in e.token_ids]
        restore_s = end.stats.restore_ms / 1e3
        if end.stats.recomputed_tokens:
            restore_s = restored_at - began
        return Turn(ids, torch.cat(self.logits), end.stats, restore_s)


class Side:
    """One method with a data directory of its own. Saves a chat, restarts, brings it back."""

    def __init__(
        self, model_dir: Path, dtype: str, method: CheckpointMethod, directory: Path, chat: Chat
    ) -> None:
        self.method = method
        self.recompute_s_per_token = 0.0  # prefill of the history while it was saved
        self._chat = chat
        self._directory = directory
        rest = len(chat.history) + len(chat.new) + ANSWER_TOKENS
        # a prefix may fill at most half of the context, which the memory limits
        self._tokens = len(chat.prefix) + max(len(chat.prefix), rest) + SPARE_TOKENS
        self._config = EngineConfig(
            model_dir=str(model_dir),
            model_name=model_dir.name,
            dtype="bf16" if dtype == "bf16" else "fp32",
            kv_memory_bytes=0,
            checkpoint_method=method,
        )
        self._engine: ObservedEngine | None = None
        self._store: ThrottledStore | None = None

    @property
    def engine(self) -> ObservedEngine:
        assert self._engine is not None, f"the engine of {self.method} is not open"
        return self._engine

    def open(self, kv_bytes_per_token: int) -> None:
        """Start an engine on the data directory."""
        self._store = ThrottledStore(DiskStore([self._directory], cap_bytes=16 << 30))
        memory = self._tokens * kv_bytes_per_token
        config = msgspec.structs.replace(self._config, kv_memory_bytes=memory)
        self._engine = ObservedEngine(config, self._store)

    def close(self) -> None:
        """End the engine and its store, as a server's end does; harmless when not open."""
        if self._engine is not None:
            self._engine.close()
        if self._store is not None:
            self._store.close()
        self._engine = self._store = None

    def save(self) -> None:
        """Hold the chat once, so that its state is on disk when this returns."""
        chat, engine = self._chat, self.engine
        engine.turn("other", chat.prefix, [], chat.new)  # the prefix, and warm kernels
        turn = engine.turn(CHAT, chat.prefix, [], chat.history)
        self.recompute_s_per_token = turn.stats.prefill_ms / 1e3 / len(chat.history)
        stats = engine.stats()
        if self._store is None or not self._store.flush(60.0):
            raise Refused(f"{self.method}: the chat was not written within a minute")
        if stats.stripes_dropped:
            raise Refused(f"{self.method}: {stats.stripes_dropped} stripes were dropped")

    def copy(self, other: Side) -> None:
        """Start from what another method saved, because this one would save the same."""
        shutil.copytree(other._directory, self._directory)
        self.recompute_s_per_token = other.recompute_s_per_token

    def stay(self) -> Turn:
        """The returning turn of a chat that is still resident: what every method must equal."""
        chat = self._chat
        turn = self.engine.turn(CHAT, chat.prefix, chat.history, chat.new)
        if turn.stats.resident_tokens != len(chat.history):
            raise Refused("the chat that should be resident is not")
        return turn

    def warm_prefix(self) -> None:
        """Bring the shared prefix back, as the first chat of a restarted server does."""
        self.engine.turn("other", self._chat.prefix, [], self._chat.new)

    def resume(self, bytes_per_s: float | None) -> Turn:
        """The returning turn, cold: K/V from the data directory at this rate, or recomputed."""
        chat, engine, store = self._chat, self.engine, self._store
        assert store is not None
        if CHAT in engine.scheduler.tree.chats:
            engine.scheduler.resident.evict(CHAT)
        store.flush(60.0)
        store.bytes_per_s = bytes_per_s
        drop_from_page_cache(self._directory)
        turn = engine.turn(CHAT, chat.prefix, chat.history, chat.new)
        stats, total = turn.stats, len(chat.history)
        expected = 0 if self.method == "recompute" else total
        if (stats.restored_tokens, stats.recomputed_tokens) != (expected, total - expected):
            raise Refused(
                f"{self.method}: {stats.restored_tokens} tokens were restored and "
                f"{stats.recomputed_tokens} recomputed of {total}"
            )
        return turn


def check_turn(what: str, turn: Turn, reference: Turn, dtype: torch.dtype) -> float:
    """Mean KL divergence, nats, over the tokens that both answered after the same ids.

    In fp32 the ids must be equal. Raises Refused.
    """
    same = list(map(int.__eq__, turn.ids, reference.ids))
    if dtype == torch.float32 and turn.ids != reference.ids:
        raise Refused(f"{what}: answered {turn.ids}, not {reference.ids}")
    compared = same.index(False) + 1 if False in same else len(same)
    compared = max(1, compared)
    return check_logits(what, turn.logits[:compared], reference.logits[:compared], dtype)

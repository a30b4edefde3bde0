"""One server's life as the benchmark sees it: chats are saved, the engine ends, they come back."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

from benchmarks.agreement import check_logits
from benchmarks.machine import drop_from_page_cache
from benchmarks.report import Refused
from benchmarks.restored import with_recomputed
from benchmarks.throttle import ThrottledStore
from engine import loading
from engine.batch import Segment
from engine.choosing import Chosen, choose
from engine.config import CheckpointMethod, EngineConfig
from engine.engine import Engine
from engine.memory.page_pool import PAGE_SIZE
from engine.messages import (
    Delta,
    Done,
    Failed,
    FromEngine,
    SamplingParams,
    Submit,
    TurnStats,
    Warm,
)
from engine.model.weight_loading import load_weights
from engine.request import Work
from engine.restoration.chunk_store import ChunkStore, ReadStream, StripeRef
from engine.restoration.plan import Plans, RestoredPart
from engine.restoration.stripes import restored_parts
from sessions.chunks import ChunkStore as DiskStore

ANSWER_TOKENS = 8  # compared, token by token, with those of a chat that was never evicted
SPARE_TOKENS = 512  # of memory: the other chat, and pages that are not full


@dataclass(frozen=True)
class Chat:
    """Token ids of a chat that leaves and comes back."""

    prefix: list[int]
    history: list[int]
    new: list[int]

    @property
    def id(self) -> str:
        return f"returning-{len(self.history)}"


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


@dataclass(frozen=True)
class Return(Turn):
    """The turn of a chat that was not in memory, and how its history's layers came back."""

    parts: list[RestoredPart]


@contextlib.contextmanager
def one_copy_of_weights() -> Iterator[None]:
    """Engines of one model share its weights, which nobody writes: no figure has their loading."""
    with patch.object(loading, "load_weights", cache(load_weights)):
        yield


class ObservedStore(ThrottledStore):
    """A throttled store that remembers what was last read of each owner."""

    def __init__(self, inner: ChunkStore) -> None:
        super().__init__(inner)
        self.last_read: dict[str, Sequence[StripeRef]] = {}

    def read(self, owner: str, refs: Sequence[StripeRef], *, budget_bytes: int) -> ReadStream:
        self.last_read[owner] = refs
        return super().read(owner, refs, budget_bytes=budget_bytes)


class ObservedEngine(Engine):
    """An engine that keeps the logits that it samples from. Driven by one thread, by hand."""

    def __init__(self, config: EngineConfig, store: ChunkStore | None) -> None:
        self.logits: list[Tensor] = []
        self.events: list[FromEngine] = []
        self.serials = itertools.count()
        super().__init__(config, store, self.events.append)

    @property
    def plans(self) -> Plans:
        """Where the plans of its chats come from."""
        assert self._recorder is not None, "an engine without a store has no plans"
        return self._recorder.plans

    def step(self) -> None:
        """One step; what it samples from is kept."""

        def kept(
            rows: Sequence[Segment], work: Mapping[Segment, Work], logits: Tensor
        ) -> list[Chosen]:
            self.logits.append(logits.clone())
            return choose(rows, work, logits)

        with patch("engine.engine.choose", kept):
            super().step()

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
    """One method with a data directory of its own. Saves chats, restarts, brings them back."""

    def __init__(self, name: str, directory: Path, config: EngineConfig, num_layers: int) -> None:
        """config: but for its memory."""
        self.name = name
        self.method: CheckpointMethod = config.checkpoint_method
        self._directory = directory
        self.config = config
        self._num_layers = num_layers
        self._stored: dict[str, int] = {}  # tokens of a chat that must come back from disk
        self._engine: ObservedEngine | None = None
        self._store: ObservedStore | None = None

    @property
    def engine(self) -> ObservedEngine:
        assert self._engine is not None, f"the engine of {self.name} is not open"
        return self._engine

    def open(self, chats: Sequence[Chat], kv_bytes_per_token: int) -> None:
        """Start an engine on the data directory, with memory for the longest of the chats."""
        self._store = ObservedStore(DiskStore([self._directory], cap_bytes=16 << 30))
        most = 0
        for chat in chats:
            rest = len(chat.history) + len(chat.new) + ANSWER_TOKENS
            # a prefix may fill at most half of the context, which the memory limits
            most = max(most, len(chat.prefix) + max(len(chat.prefix), rest) + SPARE_TOKENS)
        config = msgspec.structs.replace(self.config, kv_memory_bytes=most * kv_bytes_per_token)
        self._engine = ObservedEngine(config, self._store)

    def close(self) -> None:
        """End the engine and its store, as a server's end does; harmless when not open."""
        if self._engine is not None:
            self._engine.close()
        if self._store is not None:
            self._store.close()
        self._engine = self._store = None

    def save(self, chats: Sequence[Chat], *, stay: bool) -> dict[str, Turn]:
        """Hold each chat once, so that its state is on disk when this returns.

        With `stay`, each chat's returning turn while it is still resident: what every method must
        equal.
        """
        engine = self.engine
        self.warm_prefix(chats[0])  # and the kernels
        stayed: dict[str, Turn] = {}
        for chat in chats:
            engine.turn(chat.id, chat.prefix, [], chat.history)
            self._stored[chat.id] = self._to_store(chat)
            if stay:
                turn = engine.turn(chat.id, chat.prefix, chat.history, chat.new)
                if turn.stats.resident_tokens != len(chat.history):
                    raise Refused("the chat that should be resident is not")
                stayed[chat.id] = turn
        stats = engine.stats()
        if self._store is None or not self._store.flush(60.0):
            raise Refused(f"{self.name}: the chats were not written within a minute")
        if stats.stripes_dropped:
            raise Refused(f"{self.name}: {stats.stripes_dropped} stripes were dropped")
        return stayed

    def warm_prefix(self, chat: Chat) -> None:
        """Bring the shared prefix back, as the first chat of a restarted server does."""
        self.engine.turn("other", chat.prefix, [], chat.new)

    def resume(self, chat: Chat, bytes_per_s: float | None) -> Return:
        """The returning turn, cold: K/V from the data directory at this rate, or recomputed."""
        engine, store = self.engine, self._leave_memory(bytes_per_s)
        turn = engine.turn(chat.id, chat.prefix, chat.history, chat.new)
        stats, total = turn.stats, len(chat.history)
        expected = self._stored.get(chat.id, 0)
        if (stats.restored_tokens, stats.recomputed_tokens) != (expected, total - expected):
            raise Refused(
                f"{self.name}: {stats.restored_tokens} tokens were restored and "
                f"{stats.recomputed_tokens} recomputed of {total}; {expected} are on disk"
            )
        refs = store.last_read.get(f"c-{chat.id}", ())
        parts = restored_parts(refs, len(chat.prefix), self._num_layers)
        parts = with_recomputed(parts, len(chat.prefix), total, self._num_layers)
        return Return(turn.ids, turn.logits, stats, turn.restore_s, parts)

    def warmed(self, chat: Chat) -> tuple[Turn, Turn]:
        """The returning turn after a warm-up from a cold disk; another of a resident chat."""
        engine = self.engine
        self._leave_memory(None)
        engine.handle(Warm(chat_id=chat.id, prefix_ids=chat.prefix, history_ids=chat.history))
        while engine.has_work():
            engine.step()
        turns = []
        for what, new in (("warmed", chat.new), ("resident", chat.new[::-1])):
            turn = engine.turn(chat.id, chat.prefix, chat.history, new)
            if turn.stats.resident_tokens < len(chat.history):
                raise Refused(f"{self.name}: the {what} chat is not in memory")
            turns.append(turn)
        return turns[0], turns[1]

    def _leave_memory(self, bytes_per_s: float | None) -> ObservedStore:
        """Evict every chat and make the disk cold; what follows reads at this rate."""
        assert self._store is not None
        for resident in self.engine.scheduler.resident.idle_chats():
            self.engine.scheduler.resident.evict(resident)
        self._store.flush(60.0)
        self._store.bytes_per_s = bytes_per_s
        self._store.last_read.clear()
        drop_from_page_cache(self._directory)
        return self._store

    def _to_store(self, chat: Chat) -> int:
        """Tokens of the history whose stripes hold anything, by the plan each was saved by."""
        total, stored = len(chat.history), 0
        for start in range(0, total, PAGE_SIZE):
            end = min(total, start + PAGE_SIZE)
            plan = self.engine.plans.plan(len(chat.prefix), end)
            if plan.hidden_layers or plan.kv_layers:
                stored += end - start
        return stored


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

"""Engines stepped by hand: chats that decode, each step timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.profiling import Profile, settle
from benchmarks.report import Refused
from engine.config import CheckpointMethod, EngineConfig
from engine.engine import Engine
from engine.memory.page_pool import pages_for
from engine.messages import Cancel, Failed, FromEngine, SamplingParams, Submit, Warm
from engine.model.model_config import read_model_config
from engine.request import State
from sessions.chunks import ChunkStore

ENDLESS = 1 << 20  # tokens asked for; cancelled before


class SteppedEngine:
    """Owns an engine and its chunk store, without any when no directory is given. One thread.

    `auto` is the planner's plan, from the profile.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: str,
        method: CheckpointMethod,
        directory: Path | None,
        num_pages: int,
        page_bytes: int,
        profile: Profile,
    ) -> None:
        self.store: ChunkStore | None = None
        if directory is not None:
            self.store = ChunkStore([directory], cap_bytes=32 << 30)
        self._events: list[FromEngine] = []
        self._serials = itertools.count()
        self._running: dict[str, str] = {}  # chat -> request
        planned = directory is not None and method == "auto"
        config = EngineConfig(
            model_dir=str(model_dir),
            model_name=model_dir.name,
            dtype="bf16" if dtype == "bf16" else "fp32",
            kv_memory_bytes=num_pages * page_bytes,
            checkpoint_method=method,
            idle_evict_s=1e6,
            share_prefix="always",  # no two of the chats share one
            profile_path=str(profile.path),
            disk=profile.disk if planned else None,
        )
        self.engine = Engine(config, self.store, self._events.append)
        if planned:
            settle(config, read_model_config(model_dir))
        self.engine._eos = frozenset()  # every answer goes on until it is ended

    def begin(self, chats: Sequence[tuple[str, list[int]]]) -> None:
        """Read these prompts and decode until all are in mid-answer."""
        for chat_id, ids in chats:
            request_id = f"r{next(self._serials)}"
            self._running[chat_id] = request_id
            self.engine.handle(
                Submit(
                    request_id=request_id,
                    chat_id=chat_id,
                    prefix_ids=[],
                    history_ids=[],
                    history_computed=0,
                    new_ids=ids,
                    sampling=SamplingParams(temperature=0.0, max_tokens=ENDLESS),
                )
            )
        scheduler = self.engine.scheduler
        while any(r.state is not State.DECODE for r in (*scheduler.waiting, *scheduler.running)):
            self.engine.step()
            self._check()

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - began
        self._check()
        return seconds

    def end(self) -> None:
        """End what decodes; it is on disk when this returns."""
        for request_id in self._running.values():
            self.engine.handle(Cancel(request_id=request_id))
        self._running.clear()
        self.flush()

    def flush(self) -> None:
        """Wait for the writer. Raises Refused when it does not come to an end."""
        if self.store is not None and not self.store.flush(60.0):
            raise Refused("the writer did not come to an end within a minute")

    def tokens_held(self) -> int:
        """Tokens with K/V of all chats in memory."""
        return sum(node.seq.num_computed for node in self.engine.scheduler.tree.nodes())

    def warm(self, chat_id: str, ids: list[int]) -> None:
        """Begin to restore a chat that is on disk. Raises Refused when it is not."""
        scheduler = self.engine.scheduler
        if chat_id in scheduler.tree.chats:
            scheduler.resident.evict(chat_id)
        self.engine.handle(Warm(chat_id=chat_id, prefix_ids=[], history_ids=ids))
        if chat_id not in scheduler.warm_loads:
            raise Refused(f"nothing of {chat_id} is being restored")

    def restoring(self, chat_id: str) -> bool:
        return chat_id in self.engine.scheduler.warm_loads

    def restored(self, chat_id: str) -> int:
        """Tokens of a chat that came back."""
        root = self.engine.scheduler.tree.chats.get(chat_id)
        return 0 if root is None else sum(node.seq.num_computed for node in root.nodes())

    def close(self) -> None:
        self.engine.close()
        if self.store is not None:
            self.store.close()

    def _check(self) -> None:
        failed = [event for event in self._events if isinstance(event, Failed)]
        self._events.clear()
        if failed:
            raise Refused(f"a chat failed: {failed[0].reason}")


def pages_of(lengths: Sequence[int]) -> int:
    """Pages for sequences of these lengths, and a few to spare."""
    return sum(pages_for(length + 1) for length in lengths) + 8

"""What a shared text costs, and what sharing it saves: tokens, memory, time to read it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from app.planning import Measured, kept
from app.settings import Settings
from engine.client import Engine
from engine.errors import EngineError, EngineUnavailable
from engine.messages import PrefixUse
from sessions.repository import Repository

STATS_WAIT_S = 2.0
PROFILE_AGE_S = 60.0  # of the kept figures, before the file is looked at again


@dataclass(frozen=True, kw_only=True)
class ReadingTime:
    """How long the model takes to read so many tokens, and how that is known."""

    seconds: float
    source: str


@dataclass(frozen=True, kw_only=True)
class PrefixCost:
    """Of a shared text with the template around it. `reading` is None until it was measured."""

    tokens: int
    limit: int  # at most half of the context may be shared text
    context: int
    kv_bytes: int
    reading: ReadingTime | None

    @property
    def too_long(self) -> bool:
        return self.tokens > self.limit

    @property
    def share(self) -> float:
        """Of the context, in percent."""
        return 100 * self.tokens / self.context


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What one copy of a shared text saves, for the chats that are in memory now."""

    chats: int
    saved_bytes: int
    saved: ReadingTime | None


class Costs:
    """Knows what reading takes on this machine. Event loop only."""

    def __init__(self, *, settings: Settings, engine: Engine, repository: Repository) -> None:
        self._settings = settings
        self._engine = engine
        self._repository = repository
        self._profile: Measured | None = None
        self._looked_at: float | None = None  # monotonic seconds

    async def of(self, num_tokens: int) -> PrefixCost:
        info = self._engine.info
        return PrefixCost(
            tokens=num_tokens,
            limit=info.context_length // 2,
            context=info.context_length,
            kv_bytes=num_tokens * info.bytes_per_token_kv,
            reading=await self.reading(num_tokens),
        )

    async def reading(self, num_tokens: int) -> ReadingTime | None:
        """By the profile of this machine where there is one, else by the turns so far."""
        profile = await self._kept_profile()
        if profile is not None:
            layer_s = profile.compute.layer(num_tokens, 0)
            seconds = layer_s * profile.geometry.num_layers
            return ReadingTime(seconds=seconds, source="by this machine's measured profile")
        turns, tokens, took_ms = await self._repository.prefill_rate()
        if not tokens:
            return None
        source = "at the speed of the last turn" if turns == 1 else f"at that of {turns:,} turns"
        return ReadingTime(seconds=took_ms / 1e3 / tokens * num_tokens, source=source)

    async def sharing(self, assistant_id: str) -> Sharing | None:
        """None when the engine does not say."""
        uses = await self.uses()
        if uses is None:
            return None
        use = uses.get(assistant_id)
        if use is None or use.chats == 0:
            return Sharing(chats=0, saved_bytes=0, saved=None)
        others = use.chats - 1
        mean = use.chat_tokens // use.chats
        saved_tokens = max(0, use.chat_tokens - use.held_tokens)
        saved = None
        if others and saved_tokens:
            one = await self.reading(mean)
            if one is not None:
                seconds = one.seconds * saved_tokens / max(1, mean)
                saved = ReadingTime(seconds=seconds, source=one.source)
        return Sharing(
            chats=use.chats,
            saved_bytes=saved_tokens * self._engine.info.bytes_per_token_kv,
            saved=saved,
        )

    async def uses(self) -> dict[str, PrefixUse] | None:
        """By assistant; None when the engine does not say."""
        try:
            async with asyncio.timeout(STATS_WAIT_S):
                stats = await self._engine.stats()
        except (TimeoutError, EngineUnavailable):
            return None
        return {use.scope: use for use in stats.prefixes}

    async def _kept_profile(self) -> Measured | None:
        now = time.monotonic()
        if self._looked_at is None or now - self._looked_at > PROFILE_AGE_S:
            self._looked_at = now
            try:
                self._profile = await asyncio.to_thread(kept, self._settings)
            except EngineError:
                self._profile = None
        return self._profile

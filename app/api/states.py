"""Where the state of earlier stateless calls is: each call finds the one that it goes on from."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.client import Engine
from engine.errors import EngineUnavailable
from sessions.queries.ids import new_id
from sessions.records import ApiState

logger = logging.getLogger(__name__)

KEPT_S = 3600.0
KEPT_PER_USER = 64
KEPT_TOKENS = 16 << 20  # of all users, 4 bytes each in memory and in the database
USEFUL_TOKENS = 64  # a page: with less in common another chat is begun
TIDY_EVERY_S = 60.0


class StateStore(Protocol):
    """Where states outlive the process; part of the repository."""

    async def api_states(self) -> list[ApiState]: ...

    async def drop_api_states_before(self, used_before: float) -> None:
        """Drop those that were last used before then (seconds since the epoch)."""

    async def keep_api_state(self, state: ApiState, *, replaces: str | None) -> None: ...

    async def drop_unused_api_prefixes(self) -> None:
        """Delete system prompts that no chat has any more."""

    async def drop_api_states(self, state_ids: Sequence[str]) -> None:
        """Delete the rows; chats without any are noted to be forgotten by the engine."""


@dataclass(frozen=True)
class Found:
    """A chat to go on from; `agreed` leading ids of the call have been its before.

    A borrowed one is kept for itself, in the browser or by the API; all others are hidden.
    """

    chat_id: str
    agreed: int = 0
    computed: int = 0  # of those: have had K/V
    state_id: str | None = None
    borrowed: bool = False
    scope: str = ""  # of a borrowed chat's prefix, where that is not the user's own


@dataclass
class _State:
    id: str
    user_id: str
    chat_id: str
    prefix: array[int]
    ids: array[int]
    prompt_tokens: int  # of ids; the rest was answered
    computed: int
    used_at: float  # seconds since the epoch: they outlive the process
    stored: bool = True  # or in memory only


class States:
    """Owns the hidden chats: a bounded number for each user, kept an hour. Event loop only.

    A state is used by its own user only, and only as far as token ids agree.
    """

    def __init__(
        self, store: StateStore, engine: Engine, forget_deleted: Callable[[], Awaitable[None]]
    ) -> None:
        """`forget_deleted` has the engine drop the chats that the store notes as deleted."""
        self._store = store
        self._engine = engine
        self._forget_deleted = forget_deleted
        self._by_user: dict[str, OrderedDict[str, _State]] = {}  # least recently used first
        self._in_use: dict[str, int] = {}  # running calls, by chat
        self._last_write: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Read what earlier runs kept, and keep everything tidy from now on."""
        await self._store.drop_api_states_before(time.time() - KEPT_S)
        for row in sorted(await self._store.api_states(), key=lambda one: one.used_at):
            state = _State(
                id=row.id,
                user_id=row.user_id,
                chat_id=row.chat_id,
                prefix=array("i", row.prefix_ids),
                ids=array("i", row.token_ids),
                prompt_tokens=row.prompt_tokens,
                computed=row.computed,
                used_at=row.used_at,
            )
            self._by_user.setdefault(row.user_id, OrderedDict())[row.id] = state
        self._tidying = asyncio.create_task(self._tidy_for_ever(), name="api states")

    async def close(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.wait([self._tidying])
        if self._last_write is not None:
            await asyncio.wait([self._last_write])

    def find(
        self, user_id: str, prefix_ids: Sequence[int], ids: Sequence[int], *, stored: bool
    ) -> Found:
        """The chat whose ids agree longest with these, or a new one."""
        prefix, wanted = array("i", prefix_ids), array("i", ids)
        best: _State | None = None
        agreed = 0
        for state in reversed(self._by_user.get(user_id, {}).values()):
            if state.stored is stored and state.prefix == prefix:
                common = common_length(state.ids, wanted)
                if common > agreed and common >= min(USEFUL_TOKENS, state.prompt_tokens):
                    best, agreed = state, common
        if best is None:
            return Found(new_id())
        return Found(best.chat_id, agreed, min(agreed, best.computed), best.id)

    def use(self, chat_id: str) -> None:
        """A call runs on this chat: it is not forgotten until `release`."""
        self._in_use[chat_id] = self._in_use.get(chat_id, 0) + 1

    def release(self, chat_id: str) -> None:
        left = self._in_use[chat_id] - 1
        if left:
            self._in_use[chat_id] = left
        else:
            del self._in_use[chat_id]

    def keep(
        self,
        user_id: str,
        found: Found,
        prefix_ids: Sequence[int],
        prompt_ids: Sequence[int],
        answers: Sequence[tuple[Sequence[int], bool]],
        *,
        stored: bool,
    ) -> None:
        """A call ended: its ids are found by the next one.

        `answers`: each answer's ids, and whether its last one has K/V too.
        """
        states = self._by_user.setdefault(user_id, OrderedDict())
        before = states.get(found.state_id or "")
        replaced = before if before is not None and found.agreed >= before.prompt_tokens else None
        if replaced is not None:
            del states[replaced.id]
        for answer, complete in answers:
            ids = array("i", [*prompt_ids, *answer])
            state = _State(
                id=new_id(),
                user_id=user_id,
                chat_id=found.chat_id,
                prefix=array("i", prefix_ids),
                ids=ids,
                prompt_tokens=len(prompt_ids),
                computed=max(0, len(ids) - (0 if complete else 1)),
                used_at=time.time(),
                stored=stored,
            )
            states[state.id] = state
            if state.stored:
                old = None if replaced is None else replaced.id
                self._later(self._store.keep_api_state(_row(state), replaces=old))
            replaced = None
        over = self._over(states)
        if over:
            self._later(self._drop(over))

    def _over(self, states: OrderedDict[str, _State]) -> list[_State]:
        """Take out what is too much, the oldest first: of this user, then of all."""
        idle = [one for one in states.values() if one.chat_id not in self._in_use]
        over = idle[: max(0, len(states) - KEPT_PER_USER)]
        for state in over:
            del states[state.id]
        everything = [one for some in self._by_user.values() for one in some.values()]
        tokens = sum(len(one.ids) for one in everything)
        if tokens > KEPT_TOKENS:
            for state in sorted(everything, key=lambda one: one.used_at):
                if tokens <= KEPT_TOKENS:
                    break
                if state.chat_id not in self._in_use:
                    tokens -= len(state.ids)
                    del self._by_user[state.user_id][state.id]
                    over.append(state)
        return over

    def _later(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Do this after all that was to be done before."""
        before = self._last_write

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            try:
                await work
            except Exception:
                logger.exception("the state of an API call could not be noted")

        self._last_write = asyncio.create_task(run())
        return self._last_write

    async def _tidy_for_ever(self) -> None:
        while True:
            try:
                await self.tidy(time.time() - KEPT_S)
                await self._store.drop_unused_api_prefixes()
            except Exception:
                logger.exception("old states of API calls could not be dropped")
            await asyncio.sleep(TIDY_EVERY_S)

    async def tidy(self, before: float) -> None:
        """Drop what was last used before then (seconds since the epoch)."""
        gone: list[_State] = []
        for states in self._by_user.values():
            due = [
                one
                for one in states.values()
                if one.used_at < before and one.chat_id not in self._in_use
            ]
            for state in due:
                del states[state.id]
            gone += due
        if gone:
            await self._later(self._drop(gone))

    async def _drop(self, gone: Sequence[_State]) -> None:
        stored = [one.id for one in gone if one.stored]
        if stored:
            await self._store.drop_api_states(stored)
            await self._forget_deleted()
        left = {one.chat_id for states in self._by_user.values() for one in states.values()}
        memory = {one.chat_id for one in gone if not one.stored} - left - set(self._in_use)
        if memory:
            try:
                await self._engine.forget(sorted(memory))
            except EngineUnavailable:
                logger.info("the engine is away, and its memory with it")


def _row(state: _State) -> ApiState:
    return ApiState(
        id=state.id,
        user_id=state.user_id,
        chat_id=state.chat_id,
        prefix_ids=state.prefix.tolist(),
        token_ids=state.ids.tolist(),
        prompt_tokens=state.prompt_tokens,
        computed=state.computed,
        used_at=state.used_at,
    )


def common_length(a: array[int], b: array[int]) -> int:
    """Length of the longest common beginning, by halves: comparing arrays is fast."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

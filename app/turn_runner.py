"""Running turns: fed from the engine into the live turn, until their end is stored."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from app.live_turn import LiveTurn
from app.streams import TurnHub
from app.turn_records import Outcome, outcome_of
from engine.client import Engine, Reservation, TurnStream
from engine.messages import Delta, Done, Failed, Status, Submit
from sessions.records import Turn
from sessions.repository import Repository

logger = logging.getLogger(__name__)

STORE_AGAIN_S = (1.0, 2.0, 5.0, 15.0, 30.0)  # then every 30 s


class TurnRunner:
    """Owns the tasks that feed running turns. Event loop only."""

    def __init__(
        self,
        *,
        repository: Repository,
        engine: Engine,
        hub: TurnHub,
        after_end: Callable[[str], Awaitable[None]],
    ) -> None:
        """`after_end` is awaited with the chat's id when the end of one of its turns is stored."""
        self._repository = repository
        self._engine = engine
        self._hub = hub
        self._after_end = after_end
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.closing = False

    def start(
        self,
        group: Sequence[tuple[Turn, Submit, Reservation]],
        *,
        received_at: float,
        so_far: str = "",
    ) -> None:
        """Have the engine run turns that are in the database.

        `so_far` is the text of an answer that is gone on with. Awaits nothing, so that nobody
        sees only some of them run.
        """
        for turn, submit, place in group:
            live = self._hub.open(turn_id=turn.id, chat_id=turn.chat_id, message_id=turn.message_id)
            if submit.answered:
                ids = [*submit.history_ids, *submit.new_ids][-submit.answered :]
                live.append(so_far, ids)
                live.set_status("queued", 0, 0)
                live.saved_tokens = len(ids)
            events = self._engine.submit(submit, place)
            self._tasks[turn.id] = asyncio.create_task(
                self._run(live, events, received_at), name=f"turn {turn.id}"
            )

    async def _run(self, live: LiveTurn, events: TurnStream, received_at: float) -> None:
        """Feed the live turn from the engine until its end, then store the answer."""
        first_token_at: float | None = None
        end: Done | Failed | None = None
        try:
            async for event in events:
                match event:
                    case Status():
                        live.set_status(event.phase, event.done, event.total)
                    case Delta():
                        if first_token_at is None and event.token_ids:
                            first_token_at = time.monotonic()
                        live.append(event.text, event.token_ids)
                    case Done() | Failed():
                        end = event
        except asyncio.CancelledError:
            logger.info("turn %s is cut off", live.turn_id)
        server_ttft_ms = None if first_token_at is None else (first_token_at - received_at) * 1e3
        outcome = outcome_of(end, server_ttft_ms)
        try:
            await self._store_end(live, outcome, server_ttft_ms)
            await self._after_end(live.chat_id)
        finally:
            self._tasks.pop(live.turn_id, None)
            self._hub.close(live)

    async def _store_end(
        self, live: LiveTurn, outcome: Outcome, first_token_ms: float | None
    ) -> None:
        """Store the answer; a database that refuses (a full disk) is asked again and again.

        When the server ends meanwhile, the saved progress stands and the next start marks the
        answer as interrupted.
        """
        for delay_s in itertools.chain(STORE_AGAIN_S, itertools.repeat(STORE_AGAIN_S[-1])):
            try:
                await self._repository.finish_turn(
                    live.turn_id,
                    status=outcome.status,
                    finish_reason=outcome.finish_reason,
                    error=outcome.error,
                    text=live.text,
                    token_ids=live.token_ids,
                    latency=outcome.latency,
                    first_token_ms=first_token_ms,
                )
                return
            except Exception:
                logger.exception("the end of turn %s could not be stored", live.turn_id)
            if self.closing:
                return
            await asyncio.sleep(delay_s)

    async def stop(self, turn_id: str) -> None:
        """Stop a turn; returns when the engine confirmed it and the answer so far is stored."""
        live = self._hub.get(turn_id)
        if live is not None:
            live.set_stopping()
            await self._engine.cancel(turn_id)
            await live.wait_ended()

    async def stop_all(self, chat_id: str) -> None:
        """Stop every turn of a chat."""
        running = [live.turn_id for live in self._hub.running() if live.chat_id == chat_id]
        await asyncio.gather(*(self.stop(turn_id) for turn_id in running))

    async def close(self) -> None:
        """End every running turn as interrupted, with what it has."""
        self.closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

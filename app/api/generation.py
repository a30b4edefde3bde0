"""Answers on their way from the engine to one request, which may leave at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from app.api.errors import ApiError, api_error_of, error_of_failure
from app.api.limits import Ticket, served
from engine.client import Engine, TurnStream
from engine.errors import EngineUnavailable, QueueFull
from engine.messages import Delta, Done, Failed, FinishReason, Submit, TokenLogprobs, TurnStats

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
CLOSE_S = 5.0
SHUTTING_DOWN = "The server is shutting down."
CHAT_GONE = "The chat that this goes on from was deleted meanwhile. Send the request again."


@dataclass
class Answer:
    """One candidate so far."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Done | Failed | None = None  # the engine's last word

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish(self) -> FinishReason | None:
        return self.end.finish if isinstance(self.end, Done) else None

    @property
    def stats(self) -> TurnStats | None:
        return self.end.stats if isinstance(self.end, Done) else None


class Generation:
    """Owns the task that takes a request's answers from the engine. Event loop only.

    It ends by itself or by `cancel`; `ended` is awaited before the reader is told of the end, so
    that what it stores is stored then.
    """

    def __init__(
        self,
        engine: Engine,
        ticket: Ticket,
        submits: Sequence[Submit],
        *,
        ended: Callable[[Generation], Awaitable[None]] | None = None,
        error_param: str,
        message_id: str | None = None,
    ) -> None:
        """`message_id`: the message of a kept chat that the answer becomes."""
        self.answers = [Answer(submit.request_id) for submit in submits]
        self.error: ApiError | None = None
        self.cancelled = False
        self.first_token_at: float | None = None  # seconds of the monotonic clock
        self.message_id = message_id
        self.saved_tokens = 0  # how many ids the database has of it
        self._engine = engine
        self._ticket = ticket
        self._submits = submits
        self._ended = ended
        self._error_param = error_param
        self._events: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()
        self._submitted = False
        self._over = False
        self.task = asyncio.create_task(self._run(), name=f"api {submits[0].request_id}")

    @property
    def prompt_tokens(self) -> int:
        """Of one answer; all have the same prompt."""
        one = self._submits[0]
        return len(one.prefix_ids) + len(one.history_ids) + len(one.new_ids)

    async def events(self) -> AsyncIterator[tuple[int, Delta] | None]:
        """(candidate, delta) as they come, None after each `HEARTBEAT_S` without one."""
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if event is None:
                return
            yield event

    async def wait(self) -> None:
        """Return when all is over and stored. Raises ApiError when it failed."""
        await asyncio.shield(self.task)
        if self.error is not None:
            raise self.error

    async def cancel(self) -> None:
        """Nobody wants the answers any more; returns when the engine has let go of them."""
        if self._over or self.task.done():
            return
        self.cancelled = True
        if not self._submitted:
            self.task.cancel()
            self._ticket.leave()
        else:
            await asyncio.gather(*(self._engine.cancel(one.request_id) for one in self._submits))
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        try:
            await self._generate()
        except asyncio.CancelledError:
            self.error = ApiError(SHUTTING_DOWN, status=503, kind="server_error")
        except (QueueFull, EngineUnavailable) as error:
            self.error = api_error_of(error)
        except Exception as error:
            logger.exception("an answer failed")
            self.error = api_error_of(error)
        self._over = True
        try:
            if self._ended is not None:
                await self._ended(self)
        except Exception as error:
            logger.exception("the end of an answer could not be stored")
            self.error = api_error_of(error)
        finally:
            self._events.put_nowait(None)

    async def _generate(self) -> None:
        async with served(self._ticket, self._engine) as places:
            streams = [
                self._engine.submit(submit, place)
                for submit, place in zip(self._submits, places, strict=True)
            ]
            self._submitted = True
            await asyncio.gather(*(self._take(n, stream) for n, stream in enumerate(streams)))
        failed = next((one.end for one in self.answers if isinstance(one.end, Failed)), None)
        if self.error is None and failed is not None:
            self.error = error_of_failure(failed, self._error_param)
        given_up = any(one.finish == "cancelled" for one in self.answers)
        if self.error is None and given_up and not self.cancelled:
            self.error = ApiError(CHAT_GONE, status=409)

    async def _take(self, number: int, stream: TurnStream) -> None:
        answer = self.answers[number]
        async for event in stream:
            match event:
                case Delta():
                    if self.first_token_at is None:
                        self.first_token_at = time.monotonic()
                    answer.token_ids += event.token_ids
                    answer.texts.append(event.text)
                    answer.logprobs += event.logprobs or []
                    self._events.put_nowait((number, event))
                case Done():
                    answer.end = event
                case Failed():
                    answer.end = event
                    await asyncio.gather(  # one without the others is no answer
                        *(self._engine.cancel(one.request_id) for one in self.answers)
                    )


class Generations:
    """Owns all running generations, so that the server's end can end them. Event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: set[Generation] = set()

    def start(
        self,
        ticket: Ticket,
        submits: Sequence[Submit],
        *,
        ended: Callable[[Generation], Awaitable[None]] | None = None,
        error_param: str,
        message_id: str | None = None,
    ) -> Generation:
        """Begin; the ticket is the generation's from now on."""
        made = Generation(
            self._engine,
            ticket,
            submits,
            ended=ended,
            error_param=error_param,
            message_id=message_id,
        )
        self._running.add(made)
        made.task.add_done_callback(lambda _: self._running.discard(made))
        return made

    def running(self) -> list[Generation]:
        return list(self._running)

    async def close(self) -> None:
        """End all of them; their streams end with an error event."""
        running = list(self._running)
        for one in running:
            if one.error is None:
                one.error = ApiError(SHUTTING_DOWN, status=503, kind="server_error")
        with contextlib.suppress(TimeoutError):  # an engine that hangs is ended soon anyway
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(one.cancel() for one in running), return_exceptions=True)

"""One event stream for answers that are written side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from app.live_turn import LiveTurn
from app.streams import CLOSE_EVENT, LATER_EVENT, TurnHub, encode_event

# Renders the end of one answer, by its message's id and the HTML not yet seen closed.
CandidateRenderer = Callable[[str, str], Awaitable[str]]


async def watch_group(
    hub: TurnHub,
    lives: Sequence[LiveTurn],
    one_ended: CandidateRenderer,
    all_ended: Callable[[], Awaitable[str]],
    *,
    browser: bytes = b"",
) -> AsyncIterator[bytes]:
    """Yield the events of several running turns as they come, at last one for all and the close.

    A browser has few connections, so several answers on a page share one; it counts once.
    """
    arrived: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2 * len(lives) + 1)
    given_way = False
    ended = 0

    async def forward(live: LiveTurn, known_as: bytes) -> None:
        async def finished(unseen: str) -> str:
            return await one_ended(live.message_id, unseen)

        events = hub.watch(live, finished, browser=known_as)
        try:
            async for event in events:
                await arrived.put(event)
        finally:
            await events.aclose()
        await arrived.put(None)

    tasks = [
        asyncio.create_task(forward(live, b"" if number else browser))
        for number, live in enumerate(lives)
    ]
    closed = 0
    try:
        while ended < len(tasks) and not given_way:
            event = await arrived.get()
            if event is None:
                ended += 1
            elif event == CLOSE_EVENT:
                closed += 1
            else:
                given_way = event == LATER_EVENT
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if closed == len(tasks):
        yield encode_event(await all_ended())
        yield CLOSE_EVENT

"""The stream that answers side by side share, by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.group_stream import watch_group
from app.live_turn import LiveTurn
from app.streams import CLOSE_EVENT, LATER_EVENT, STREAMS_PER_BROWSER, TurnHub

pytestmark = pytest.mark.anyio


def frame(turn: LiveTurn, *, first_block: int, whole: bool) -> str:
    return f"{turn.message_id}: {turn.text}"


async def one_ended(message_id: str, unseen: str) -> str:
    return f"{message_id} has ended"


async def all_ended() -> str:
    return "all have ended"


def group(hub: TurnHub, *names: str) -> list[LiveTurn]:
    return [hub.open(turn_id=f"t{name}", chat_id="c", message_id=name) for name in names]


async def rest(events: AsyncIterator[bytes]) -> list[bytes]:
    async with asyncio.timeout(5):
        return [event async for event in events]


async def test_it_closes_once_when_all_have_ended() -> None:
    hub = TurnHub(frame)
    lives = group(hub, "a", "b", "c")
    stream = watch_group(hub, lives, one_ended, all_ended)
    first = {await anext(stream) for _ in lives}
    assert first == {b"data: a: \n\n", b"data: b: \n\n", b"data: c: \n\n"}
    for live in lives:
        hub.close(live)
    events = await rest(stream)
    assert events[-2:] == [b"data: all have ended\n\n", CLOSE_EVENT]
    assert sorted(events[:-2]) == [f"data: {name} has ended\n\n".encode() for name in "abc"]


async def test_it_counts_as_one_stream_of_its_browser_and_makes_way_as_one() -> None:
    hub = TurnHub(frame)
    lives = group(hub, "a", "b", "c")
    stream = watch_group(hub, lives, one_ended, all_ended, browser=b"browser")
    for _ in lives:
        await anext(stream)
    others = []
    for number in range(STREAMS_PER_BROWSER):
        assert [live.watchers for live in lives] == [1, 1, 1]
        [other] = group(hub, f"other {number}")

        async def never(unseen: str) -> str:
            raise AssertionError("it does not end")

        others.append(hub.watch(other, never, browser=b"browser"))
        await anext(others[-1])
    assert await rest(stream) == [LATER_EVENT], "without the close: the browser comes back"
    assert [live.watchers for live in lives] == [0, 0, 0]


async def test_the_servers_end_is_no_close() -> None:
    hub = TurnHub(frame)
    lives = group(hub, "a", "b")
    stream = watch_group(hub, lives, one_ended, all_ended)
    for _ in lives:
        await anext(stream)
    hub.end_streams()
    assert await rest(stream) == []


async def test_a_viewer_that_leaves_watches_nothing_any_more() -> None:
    hub = TurnHub(frame)
    lives = group(hub, "a", "b")
    stream = watch_group(hub, lives, one_ended, all_ended)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
    assert [live.watchers for live in lives] == [0, 0]

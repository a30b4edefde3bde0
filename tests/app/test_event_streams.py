"""What watchers of a running answer receive, event by event."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime

import pytest

from app import live_turn, streams
from app.pacing import FRAME_GAP_S, MAX_GAP_S, SHARE, Pace
from app.rendering import BlockRenderer, BlockUpdate, render_markdown
from app.streams import LiveTurn, TurnHub, encode_event
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import Browser, Events, Server, partials, text_of

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


class Screen:
    """What a browser shows of one answer: it does with events what htmx does."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        self.html = {"blocks": "", "open": "", "status": "", "message": ""}
        self.announced: list[str] = []
        self.swaps: list[str] = []

    def show(self, event: str) -> None:
        for target, (swap, html) in partials(event).items():
            name = target.removeprefix("#").removesuffix(f"-{self.message_id}")
            if name == "blocks":
                self.swaps.append(swap)
                self.html[name] = html if swap == "innerHTML" else self.html[name] + html
            elif name in self.html:
                self.html[name] = html
            elif name == "announcer":
                self.announced.append(html)

    @property
    def answer(self) -> str:
        return self.html["blocks"] + self.html["open"]


async def answer_of(events: Events, screen: Screen, text: str) -> None:
    """Read events until the screen shows this text."""
    async with asyncio.timeout(5):
        while screen.answer != render_markdown(text):
            name, data = await events.next()
            assert name == ""
            screen.show(data)


async def test_first_event_has_everything_later_ones_what_is_new_and_the_last_one_ends_it(
    browser: Browser, server: Server
) -> None:
    chat_id = await browser.new_chat()
    turn = await server.engine.next_turn(0)
    turn.say("First *block*.\n\nSec")
    live = server.app.state.services.hub.get(browser.turn_id)
    await until(lambda: live.text.endswith("Sec"))
    screen = Screen(live.message_id)
    async with browser.events(browser.turn_id) as events:
        headers = events.response.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-accel-buffering"] == "no"
        assert headers["cache-control"] == "no-store, no-transform"  # no proxy may compress it
        assert "content-encoding" not in headers
        _, first = await events.next()
        screen.show(first)
        assert screen.answer == render_markdown("First *block*.\n\nSec")
        turn.say("ond block.\n\nThird\nfour")
        text = "First *block*.\n\nSecond block.\n\nThird\nfour"
        await answer_of(events, screen, text)
        assert screen.swaps[0] == "innerHTML"
        assert set(screen.swaps[1:]) == {"beforeend"}
        assert "Second block." in "".join(screen.announced)
        turn.end()
        rest = await events.rest()
    *_, (last_name, last), close = rest
    assert close == ("turn-end", "done")
    assert last_name == ""
    screen.show(last)
    assert screen.announced[-1] == "Third four The answer has ended."
    assert render_markdown(text).strip() in last
    assert "hx-sse:connect" not in last
    assert "first token" in screen.html["message"]
    assert partials(last)["#composer-controls"][0] == "outerHTML"
    assert "disabled" not in partials(last)["#composer-controls"][1]
    assert chat_id in browser.page


async def test_a_reconnect_in_the_middle_neither_loses_nor_doubles_text(
    browser: Browser, server: Server
) -> None:
    await browser.new_chat()
    turn = await server.engine.next_turn(0)
    turn_id = browser.turn_id
    live = server.app.state.services.hub.get(turn_id)
    screen = Screen(live.message_id)
    said = ""
    for round_number in range(4):
        async with browser.events(turn_id) as events:
            for part in range(3):
                piece = f"Paragraph {round_number}.{part}\n\n- item\n- item `{part}`\n\n"
                turn.say(piece)
                said += piece
                await answer_of(events, screen, said)
        turn.say("Unseen.\n\n")
        said += "Unseen.\n\n"
    async with browser.events(turn_id) as events:
        await answer_of(events, screen, said)
    turn.end()
    await until(lambda: server.app.state.services.hub.get(turn_id) is None)


async def test_white_space_survives_the_protocol() -> None:
    html = "<pre>  a\n\n\tb\r\nc\n</pre>\n"
    lines = encode_event(html).decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines[:-2]]
    assert "\n".join(data) == html.replace("\r\n", "\n")
    assert lines[-2:] == ["", ""]
    odd = "a\x0bb\x0cc\x85d\u2028e"  # no line ends for the protocol
    assert encode_event(odd).decode() == f"data: {odd}\n\n"


async def test_waiting_is_told_at_once_and_in_numbers(browser: Browser, server: Server) -> None:
    await browser.new_chat()
    turn = await server.engine.next_turn(0)
    live = server.app.state.services.hub.get(browser.turn_id)
    screen = Screen(live.message_id)

    async def status(events: Events, text: str) -> None:
        async with asyncio.timeout(5):
            while text_of(screen.html["status"]).strip() != text:
                screen.show((await events.next())[1])

    async with browser.events(browser.turn_id) as events:
        await status(events, "Waiting in the queue")
        turn.status("restoring", 512, 1204)
        await status(events, "Restoring 512 of 1,204 tokens")
        turn.status("reading", 10, 20)
        await status(events, "Reading the prompt, 10 of 20 tokens")
        turn.say("x")
        await status(events, "Answering")
        turn.end()


async def test_silence_is_filled_with_signs_of_life(
    browser: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.05)
    await browser.new_chat()
    turn = await server.engine.next_turn(0)
    async with browser.events(browser.turn_id) as events:
        assert (await events.next())[0] == ""
        assert (await events.next())[0] == "still-here"
        assert (await events.next())[0] == "still-here"
    turn.end()


async def test_a_finished_turn_answers_200_its_end_and_close(
    browser: Browser, server: Server
) -> None:
    await browser.new_chat()
    turn = await server.engine.next_turn(0)
    turn_id = browser.turn_id
    turn.say("Done.")
    turn.end()
    await until(lambda: server.app.state.services.hub.get(turn_id) is None)
    async with browser.events(turn_id) as events:
        assert events.response.status_code == 200
        found = await events.rest()
    assert [name for name, _ in found] == ["", "turn-end"]
    assert "Done." in found[0][1]
    assert "hx-sse:connect" not in found[0][1]


async def test_a_chat_deleted_under_its_watchers_ends_their_streams_with_words(
    browser: Browser, server: Server
) -> None:
    chat_id = await browser.new_chat()
    await server.engine.next_turn(0)
    async with browser.events(browser.turn_id) as events:
        await events.next()
        repository = server.app.state.services.repository
        with closing(sqlite3.connect(repository._database.path)) as db:
            [(user_id,)] = db.execute("SELECT user_id FROM chat").fetchall()
        await repository.delete_chat(user_id, chat_id)
        await repository.purge_deleted(datetime.now(UTC))
        server.engine.turns[0].end()
        *_, last, close = await events.rest()
    assert close == ("turn-end", "done")
    assert "There is no such page." in last[1]


async def test_a_watcher_that_leaves_is_forgotten_and_the_turn_goes_on(
    browser: Browser, server: Server
) -> None:
    await browser.new_chat()
    turn = await server.engine.next_turn(0)
    live = server.app.state.services.hub.get(browser.turn_id)
    async with browser.events(browser.turn_id) as events:
        await events.next()
        assert live.watchers == 1
    await until(lambda: live.watchers == 0)
    turn.say("still")
    await until(lambda: live.text == "still")
    turn.end()


async def test_the_end_of_the_server_ends_streams_without_the_close_event(
    browser: Browser, server: Server
) -> None:
    await browser.new_chat()
    await server.engine.next_turn(0)
    async with browser.events(browser.turn_id) as events:
        await events.next()
        server.app.state.services.hub.end_streams()
        assert "turn-end" not in [name for name, _ in await events.rest()]


class CountingRenderer(BlockRenderer):
    feeds = 0

    def feed(self, full_text: str) -> BlockUpdate:
        CountingRenderer.feeds += 1
        return super().feed(full_text)


async def no_html(_: str) -> str:
    return ""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountingRenderer]:
    monkeypatch.setattr(live_turn, "BlockRenderer", CountingRenderer)
    CountingRenderer.feeds = 0
    return CountingRenderer


def frame(turn: LiveTurn, *, first_block: int, whole: bool) -> str:
    return "".join(turn.closed_blocks[first_block:]) + turn.open_block


async def test_text_is_rendered_once_for_all_and_only_while_watched(
    counted: type[CountingRenderer],
) -> None:
    hub = TurnHub(frame)
    turn = hub.open(turn_id="t", chat_id="c", message_id="m")
    for _ in range(50):
        turn.append("word ", [1])
    await asyncio.sleep(0.3)
    assert counted.feeds == 0
    watchers = [hub.watch(turn, no_html) for _ in range(8)]
    firsts = [await anext(watcher) for watcher in watchers]
    assert len(set(firsts)) == 1
    assert counted.feeds == 1
    started = asyncio.get_running_loop().time()
    reading = [asyncio.ensure_future(_count(watcher)) for watcher in watchers]
    for _ in range(60):
        turn.append("word ", [1])
        await asyncio.sleep(0.01)
    took = asyncio.get_running_loop().time() - started
    hub.close(turn)
    counts = await asyncio.gather(*reading)
    assert counted.feeds <= 2 + took / FRAME_GAP_S
    assert max(counts) <= counted.feeds + 1  # a frame each, the end, and close
    assert turn.watchers == 0


async def _count(events: object) -> int:
    count = 0
    async for _ in events:  # type: ignore[attr-defined]
        count += 1
    return count


async def test_a_stream_of_nobody_known_is_a_404(server: Server, fake_engine: FakeEngine) -> None:
    async with server.browser() as browser:
        response = await browser.get(f"/turns/{'0' * 32}/events")
    assert response.status_code == 404
    assert not response.headers["content-type"].startswith("text/event-stream")


async def test_places_in_the_queue_are_told_and_move_up() -> None:
    hub = TurnHub(frame)
    first, second, third = (
        hub.open(turn_id=name, chat_id=name, message_id=name) for name in ("one", "two", "three")
    )
    assert [turn.done for turn in (first, second, third)] == [0, 1, 2]
    third.set_status("queued", 0, 3)  # what the engine counts is not this one's place
    assert third.done == 2
    first.set_status("reading", 5, 10)
    assert [turn.done for turn in (first, second, third)] == [5, 0, 1]
    hub.close(second)
    assert third.done == 0
    first.set_status("queued", 0, 1)  # sent back, to make room: it is the next one again
    assert [turn.done for turn in (first, third)] == [0, 1]


async def test_waiting_behind_others_is_told_in_numbers(browser: Browser, server: Server) -> None:
    await browser.new_chat()
    await server.engine.next_turn(0)
    await browser.new_chat("Me too")
    await server.engine.next_turn(1)
    async with browser.events(browser.turn_id) as events:
        screen = Screen(server.app.state.services.hub.get(browser.turn_id).message_id)
        screen.show((await events.next())[1])
        assert text_of(screen.html["status"]).strip() == "Waiting in the queue, 1 before this one"
        server.engine.turns[0].say("x")
        screen.show((await events.next())[1])
        assert text_of(screen.html["status"]).strip() == "Waiting in the queue"
    for turn in server.engine.turns:
        turn.end()


async def test_a_stop_that_is_not_yet_confirmed_is_told_to_every_watcher() -> None:
    hub = TurnHub(lambda turn, **_: turn.phase)
    turn = hub.open(turn_id="t", chat_id="c", message_id="m")
    turn.append("word ", [1])
    events = hub.watch(turn, no_html)
    assert await anext(events) == b"data: answering\n\n"
    turn.set_stopping()
    turn.append("a last word", [2])  # it was on its way
    assert await anext(events) == b"data: stopping\n\n"
    hub.close(turn)
    assert [event async for event in events] == [b"data: \n\n", streams.CLOSE_EVENT]


async def test_a_browser_keeps_connections_for_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six to a server is all that it opens: the oldest stream makes way, and comes back later."""
    hub = TurnHub(frame)
    turns = [hub.open(turn_id=str(n), chat_id=str(n), message_id=str(n)) for n in range(6)]
    watched = [hub.watch(turn, no_html, browser=b"one") for turn in turns]
    for events in watched:
        assert (await anext(events)).startswith(b"data: ")
    elsewhere = hub.watch(turns[0], no_html, browser=b"another")
    await anext(elsewhere)
    async with asyncio.timeout(2):
        for events in watched[:2]:
            assert [event async for event in events] == [streams.LATER_EVENT]
    assert [turn.watchers for turn in turns] == [1, 0, 1, 1, 1, 1]
    again = hub.watch(turns[0], no_html, browser=b"one")
    await anext(again)
    assert [event async for event in watched[2]] == [streams.LATER_EVENT]
    for turn in turns:
        hub.close(turn)
    for events in (*watched[3:], again, elsewhere):
        assert [event async for event in events][-1] == streams.CLOSE_EVENT
    assert hub._streams == {}


def test_dear_frames_come_less_often() -> None:
    pace = Pace(cores=3)
    assert pace.gap_s == FRAME_GAP_S
    for number in range(32):
        pace.note(f"turn {number}", 0.001)
    assert pace.gap_s == pytest.approx(32 * 0.001 / (3 * SHARE))
    pace.note("a huge table", 1.0)
    assert pace.gap_s == MAX_GAP_S
    for number in range(32):
        pace.forget(f"turn {number}")
    pace.forget("a huge table")
    assert pace.gap_s == FRAME_GAP_S


def test_frames_of_all_answers_are_due_at_one_moment() -> None:
    pace = Pace(cores=1)
    first = 100.0 + pace.wait_s(100.0)
    assert first == 100.0 + FRAME_GAP_S
    assert 100.15 + pace.wait_s(100.15) == pytest.approx(first)
    for number in range(32):
        pace.note(f"turn {number}", 0.0005)
    assert 100.19 + pace.wait_s(100.19) == pytest.approx(first)
    assert pace.wait_s(first) == pytest.approx(32 * 0.0005 / SHARE)


class MeasuringRenderer(BlockRenderer):
    parsed: list[int] = []  # noqa: RUF012, characters that each feed had to look at

    def feed(self, full_text: str) -> BlockUpdate:
        self.parsed.append(len(full_text) - self._open_from)
        return super().feed(full_text)


async def test_work_for_a_token_does_not_grow_with_what_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the text that is looked at nor the bytes sent: early and late frames are alike."""
    monkeypatch.setattr(live_turn, "BlockRenderer", MeasuringRenderer)
    monkeypatch.setattr(MeasuringRenderer, "parsed", [])
    hub = TurnHub(frame)
    turn = hub.open(turn_id="t", chat_id="c", message_id="m")
    events = hub.watch(turn, no_html)
    sizes = []
    for number in range(400):
        turn.append(f"Paragraph {number:03} with some **bold** words and `code`.\n\n", [1])
        turn.render()
        sizes.append(len(await anext(events)))
    assert max(sizes[300:]) <= max(sizes[5:100])
    assert max(MeasuringRenderer.parsed[300:]) <= max(MeasuringRenderer.parsed[5:100])
    hub.close(turn)
    await events.aclose()


@pytest.mark.parametrize("laps", range(6))
async def test_a_watcher_that_leaves_just_as_text_comes_is_gone(laps: int) -> None:
    """The cancellation meets the wake-up; missed, the stream would go on to the turn's end."""
    hub = TurnHub(lambda turn, *, first_block, whole: "-")
    turn = hub.open(turn_id="t", chat_id="c", message_id="m")
    left, sent = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        sent.set()

    async def finished(unseen: str) -> str:
        return unseen

    stream = streams.EventStream(hub.watch(turn, finished))
    sending = asyncio.create_task(stream.send_body(send, receive))  # type: ignore[arg-type]
    await sent.wait()
    await asyncio.sleep(0)
    left.set()
    for _ in range(laps):  # through the tasks between the client's end and the cancellation
        await asyncio.sleep(0)
    turn.wake()
    async with asyncio.timeout(1):
        await sending
    assert turn.watchers == 0

"""Several answers to one question at once, side by side, and the one that is gone on from."""

from __future__ import annotations

import asyncio
import re

import pytest

from app.settings import Settings
from engine.turn_stream import Places
from tests.app.fake_engine import FakeTurn
from tests.app.talk import ended, messages, new_chat, rows, texts, until
from tests.app.web_client import Browser, Server, field, partials, text_of

pytestmark = pytest.mark.anyio


async def ask_for(
    browser: Browser, server: Server, chat_id: str, number: int, *, htmx: bool = False
) -> list[FakeTurn]:
    """Send a message for so many answers; the turns that the engine got."""
    begun = len(server.engine.turns)
    await browser.get(f"/chats/{chat_id}")
    fields = {
        "text": "Which?",
        "parent_id": field(browser.page, "parent_id"),
        "answers": str(number),
    }
    response = await browser.post(f"/chats/{chat_id}/messages", fields, htmx=htmx)
    assert response.status_code == (200 if htmx else 303), response.text
    return [await server.engine.next_turn(begun + n) for n in range(number)]


async def test_the_engine_gets_one_request_for_each(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    turns = await ask_for(browser, server, chat_id, 3)
    first = turns[0].submit
    assert [turn.submit.candidate for turn in turns] == [0, 1, 2]
    assert len({turn.submit.request_id for turn in turns}) == 3
    for turn in turns:
        same = ("chat_id", "prefix_ids", "history_ids", "history_computed", "new_ids", "sampling")
        assert all(getattr(turn.submit, name) == getattr(first, name) for name in same)
    assert server.engine.places.in_use == 3
    for number, turn in enumerate(turns):
        turn.say(f"answer {number}")
        turn.end()
    page = await ended(browser, chat_id)
    assert texts(page) == ["One", "uno", "Which?", "answer 0", "answer 1", "answer 2"]
    assert "3 answers side by side" in page
    assert "Your next message goes on from answer 1." in text_of(page)
    assert len(rows(web_settings, "SELECT id FROM message WHERE role = 'user'")) == 2
    assert server.engine.places.in_use == 0


async def test_a_chat_can_begin_with_several(browser: Browser, server: Server) -> None:
    home = (await browser.get("/")).text
    assert re.findall(r'<option value="(\d)">', home) == ["1", "2", "3", "4"]
    fields = {
        "text": "Which?",
        "assistant_id": field(home, "assistant_id"),
        "submission": field(home, "submission"),
        "answers": "2",
    }
    began = await browser.post("/chats", fields)
    assert began.status_code == 303
    for number in range(2):
        turn = await server.engine.next_turn(number)
        turn.say(f"answer {number}")
        turn.end()
    page = await ended(browser, began.headers["location"].removeprefix("/chats/"))
    assert texts(page) == ["Which?", "answer 0", "answer 1"]


async def test_the_chosen_one_is_gone_on_from(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    for number, turn in enumerate(await ask_for(browser, server, chat_id, 3)):
        turn.say(f"answer {number}")
        turn.end()
    page = await ended(browser, chat_id)
    third_id = messages(page)[5][0]
    assert (await browser.post(f"/messages/{third_id}/select")).status_code == 303
    page = (await browser.get(f"/chats/{chat_id}")).text
    assert "Your next message goes on from answer 3." in text_of(page)
    assert field(page, "parent_id") == third_id
    assert (await browser.say(chat_id, "Then")).status_code == 303
    turn = await server.engine.next_turn(4)
    history = bytes(token for token in turn.submit.history_ids if token < 256)
    assert b"answer 2" in history
    assert b"answer 0" not in history
    turn.say("good")
    turn.end()
    page = await ended(browser, chat_id)
    assert texts(page) == ["One", "uno", "Which?", "answer 2", "Then", "good"]
    again = f"/messages/{third_id}/again"
    assert f'href="{again}"' in page, "they can be asked for again"
    assert "3 answers side by side</button>" in (await browser.get(again)).text
    assert "candidates__answers" not in page
    assert re.findall(r'branch__place">([^<]*)<', page) == ["3 / 3"]


async def test_one_can_be_chosen_while_they_are_written(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    turns = await ask_for(browser, server, chat_id, 2)
    page = (await browser.get(f"/chats/{chat_id}")).text
    second_id = messages(page)[4][0]
    assert (await browser.post(f"/messages/{second_id}/select")).status_code == 303
    turns[1].say("this one")
    turns[1].end()
    page = (await browser.get(f"/chats/{chat_id}")).text
    assert field(page, "parent_id") == second_id
    assert "2 answers are being written." in text_of(page)
    turns[0].end()
    assert field(await ended(browser, chat_id), "parent_id") == second_id


async def test_they_share_one_stream_which_ends_with_the_last(
    browser: Browser, server: Server
) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    turns = await ask_for(browser, server, chat_id, 2)
    page = (await browser.get(f"/chats/{chat_id}")).text
    connects = re.findall(r'hx-sse:connect="([^"]*)"', page)
    assert len(connects) == 1
    ids = [message_id for message_id, _, _ in messages(page)[3:]]
    async with browser.http.stream("GET", connects[0]) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()

        async def next_event() -> str:
            found: list[str] = []
            async with asyncio.timeout(5):
                async for line in lines:
                    if not line:
                        return "\n".join(found)
                    found.append(line)
            raise AssertionError("the stream has ended")

        seen = await next_event() + await next_event()
        assert all(f"#blocks-{one}" in seen for one in ids), "the whole of each so far"
        turns[1].say("faster")
        while "faster" not in (event := await next_event()):
            pass
        assert f"#open-{ids[1]}" in event
        turns[1].end()
        while "has ended" not in (event := await next_event()):
            pass
        assert "Answer 2 has ended." in event
        replaced = partials(event.replace("data: ", ""))
        assert f"#message-{ids[1]}" in replaced
        assert "#composer-controls" not in replaced, "the other one is still written"
        turns[0].say("slower")
        turns[0].end()
        while "All answers have ended." not in (event := await next_event()):
            pass
        assert "candidates__answers" in event
        assert "hx-sse:connect" not in event
        assert "#composer-controls" in event
        assert await next_event() == "event: turn-end\ndata: done"
    for turn in turns:  # late ones get the end at once
        late = await browser.http.get(f"/turns/{turn.submit.request_id}/candidates")
        assert "All answers have ended." in late.text
        assert late.text.endswith("event: turn-end\ndata: done\n\n")


async def test_a_viewer_that_leaves_ends_nothing(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    turns = await ask_for(browser, server, chat_id, 2)
    hub = server.app.state.services.hub
    path = f"/turns/{turns[0].submit.request_id}/candidates"
    async with browser.http.stream("GET", path):
        await until(lambda: [live.watchers for live in hub.running()] == [1, 1])
    await until(lambda: [live.watchers for live in hub.running()] == [0, 0])
    assert server.engine.cancelled == []
    for turn in turns:
        turn.end()
    await ended(browser, chat_id)


async def test_an_answer_alone_has_no_shared_stream(browser: Browser, server: Server) -> None:
    await new_chat(browser, server, "One", "uno")
    path = f"/turns/{server.engine.turns[0].submit.request_id}/candidates"
    assert (await browser.http.get(path)).status_code == 404


async def test_one_is_stopped_or_all(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    turns = await ask_for(browser, server, chat_id, 3)
    ids = [turn.submit.request_id for turn in turns]
    await until(lambda: len(server.app.state.services.hub.running()) == 3)
    one = await browser.post(f"/turns/{ids[1]}/stop", htmx=True)
    assert "You stopped this answer." in one.text
    assert "#composer-controls" not in one.text
    assert server.engine.cancelled == [ids[1]]
    rest = await browser.post(f"/turns/{ids[0]}/stop", {"all": "1"}, htmx=True)
    assert set(server.engine.cancelled[1:]) == {ids[0], ids[2]}
    assert rest.text.count("You stopped this answer.") == 3
    assert "hx-sse:connect" not in rest.text


async def test_a_message_waits_for_all_of_them(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    turns = await ask_for(browser, server, chat_id, 2)
    queued = await browser.say(chat_id, "Then")
    assert queued.status_code == 303
    turns[0].say("first")
    turns[0].end()
    await until(lambda: len(server.app.state.services.hub.running()) == 1)
    await asyncio.sleep(0.1)
    assert len(server.engine.turns) == 3
    turns[1].end()
    sent = await server.engine.next_turn(3)
    assert b"first" in bytes(token for token in sent.submit.history_ids if token < 256)
    sent.end()
    await ended(browser, chat_id)


async def test_some_may_fail_and_the_rest_stand(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    turns = await ask_for(browser, server, chat_id, 2)
    turns[0].fail(reason="A page was lost.")
    turns[1].say("fine")
    turns[1].end()
    page = await ended(browser, chat_id)
    assert "A page was lost." in page
    assert texts(page)[3:] == ["", "fine"]
    retried = await browser.post(f"/messages/{messages(page)[3][0]}/retry")
    assert retried.status_code == 303
    turn = await server.engine.next_turn(3)
    assert turn.submit.candidate == 0
    turn.say("at last")
    turn.end()
    page = await ended(browser, chat_id)
    assert texts(page)[3:] == ["at last"]
    assert re.findall(r'branch__place">([^<]*)<', page) == ["3 / 3"]


async def test_answering_again_several_times_shows_the_new_ones(
    browser: Browser, server: Server
) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    answer_id = messages(browser.page)[1][0]
    again = await browser.post(f"/messages/{answer_id}/again", {"answers": "2"}, htmx=True)
    assert "candidates__answers" in again.text
    for number in (1, 2):
        turn = await server.engine.next_turn(number)
        turn.say(f"again {number}")
        turn.end()
    page = await ended(browser, chat_id)
    assert texts(page) == ["One", "again 1", "again 2"]
    assert re.findall(r'branch__place">([^<]*)<', page) == ["2\N{EN DASH}3 / 3"]


async def test_without_room_for_all_none_is_begun(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    server.engine.places = Places(3)
    fields = {"text": "Which?", "parent_id": field(browser.page, "parent_id"), "answers": "4"}
    refused = await browser.post(f"/chats/{chat_id}/messages", fields, htmx=True)
    assert refused.status_code == 429
    assert server.engine.places.in_use == 0
    assert texts((await browser.get(f"/chats/{chat_id}")).text) == ["One", "uno"]


async def test_other_numbers_are_refused(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    for number in ("0", "5", "-1", "two", "1.5", "\u0663"):
        fields = {"text": "x", "parent_id": field(browser.page, "parent_id"), "answers": number}
        refused = await browser.post(f"/chats/{chat_id}/messages", fields, htmx=True)
        assert refused.status_code == 400, number
        assert "1 to 4 can be asked for at once" in refused.text
    assert len(server.engine.turns) == 1

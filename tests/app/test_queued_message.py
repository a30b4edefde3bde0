"""One message waits while an answer runs: sent, withdrawn, held, kept over restarts."""

from __future__ import annotations

import asyncio
import html
import re

import pytest

import app.queued_messages
from app.settings import Settings
from engine.turn_stream import Places
from tests.app.fake_engine import FakeEngine
from tests.app.talk import ended, new_chat, rows, texts, until
from tests.app.web_client import Browser, Server, field, serving, text_of

pytestmark = pytest.mark.anyio


def composed(page: str) -> str:
    """What stands in the text field of the page."""
    found = re.search(r'<textarea class="composer__text"[^>]*>\n(.*?)</textarea>', page, re.DOTALL)
    assert found is not None
    return html.unescape(found[1])


async def test_it_is_shown_and_sent_when_the_answer_has_ended(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await browser.new_chat("One")
    first = await server.engine.next_turn(0)
    assert (await browser.say(chat_id, "Two\r\n")).headers["location"].endswith("#composer")
    page = (await browser.get(f"/chats/{chat_id}")).text
    assert "Queued: sent when the answer has ended." in text_of(page)
    assert texts(page) == ["One", ""], "it is no message yet"
    assert rows(web_settings, "SELECT text FROM queued_message") == [("Two\n",)]
    assert len(server.engine.turns) == 1
    first.say("uno")
    first.end()
    second = await server.engine.next_turn(1)
    assert second.submit.history_ids == first.submit.new_ids + list(b"uno")
    second.say("dos")
    second.end()
    page = await ended(browser, chat_id)
    assert texts(page) == ["One", "uno", "Two", "dos"]
    assert "queued__text" not in page
    assert rows(web_settings, "SELECT * FROM queued_message") == []


async def test_the_page_gets_it_with_the_end_of_the_answer(
    browser: Browser, server: Server
) -> None:
    chat_id = await browser.new_chat("One")
    first = await server.engine.next_turn(0)
    await browser.get(f"/chats/{chat_id}")
    queued = await browser.say(chat_id, "Two", htmx=True)
    assert queued.status_code == 200
    for target in ("#composer-controls", "#composer-text", "#notice"):
        assert f'<hx-partial hx-target="{target}"' in queued.text
    assert "message--user" not in queued.text
    async with browser.events(browser.turn_id) as events:
        first.say("uno")
        first.end()
        *_, (_, last), close = await events.rest()
    assert close[0] == "turn-end"
    assert '<hx-partial hx-target="#conversation" hx-swap="beforeend">' in last
    assert "Two" in last
    second = await server.engine.next_turn(1)
    assert f'hx-sse:connect="/turns/{second.submit.request_id}/events"' in last
    assert "queued__text" not in last
    second.end()
    await ended(browser, chat_id)


async def test_a_second_one_gets_409_and_keeps_its_text(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    answers = await asyncio.gather(
        *(browser.say(chat_id, f"then {n}", htmx=True) for n in range(3))
    )
    assert sorted(one.status_code for one in answers) == [200, 409, 409]
    refused = next(one for one in answers if one.status_code == 409)
    assert refused.headers["hx-retarget"] == "#notice"
    assert "Withdraw that one, or wait until it was sent; your text is still here." in text_of(
        refused.text
    )
    as_page = await browser.say(chat_id, "and this")
    assert as_page.status_code == 409
    assert composed(as_page.text) == "and this"
    turn.end()
    (await server.engine.next_turn(1)).end()
    assert len(texts(await ended(browser, chat_id))) == 4


async def test_withdrawn_it_is_back_in_the_field(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    await browser.say(chat_id, "  Two\n")
    fields = {"text": "and more"}
    back = await browser.post(f"/chats/{chat_id}/queued/withdraw", fields, htmx=True)
    assert composed(back.text) == "  Two\n\n\nand more"
    assert "queued__text" not in back.text
    assert (await browser.say(chat_id, "Three")).status_code == 303, "there is room again"
    page = await browser.post(f"/chats/{chat_id}/queued/withdraw")
    assert composed(page.text) == "Three"
    assert composed((await browser.post(f"/chats/{chat_id}/queued/withdraw")).text) == ""
    turn.end()
    assert len(texts(await ended(browser, chat_id))) == 2
    assert len(server.engine.turns) == 1


async def test_after_stop_it_is_sent(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    turn.say("un")
    await browser.get(f"/chats/{chat_id}")
    await browser.say(chat_id, "Never mind: two")
    await until(lambda: server.app.state.services.hub.running()[0].text == "un")
    stopped = await browser.post(f"/turns/{turn.submit.request_id}/stop", htmx=True)
    assert "Never mind: two" in stopped.text
    (await server.engine.next_turn(1)).end()
    assert texts(await ended(browser, chat_id))[2] == "Never mind: two"


async def test_after_a_failure_it_waits_for_its_user(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    await browser.say(chat_id, "Two")
    turn.say("un")
    turn.fail()
    page = await ended(browser, chat_id)
    assert "It was not sent: the answer before it failed." in text_of(page)
    assert len(server.engine.turns) == 1
    sent = await browser.post(f"/chats/{chat_id}/queued/send", htmx=True)
    assert texts(sent.text)[:3] == ["One", "un", "Two"]
    (await server.engine.next_turn(1)).end()
    page = await ended(browser, chat_id)
    assert "queued__text" not in page
    again = await browser.post(f"/chats/{chat_id}/queued/send")
    assert again.status_code == 303
    assert len(server.engine.turns) == 2


async def test_one_that_is_held_is_sent_by_its_user_alone(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    await browser.say(chat_id, "Two")
    turn.fail()
    await ended(browser, chat_id)
    assert (await browser.say(chat_id, "Something else")).status_code == 303
    other = await server.engine.next_turn(1)
    other.say("fine")
    other.end()
    page = await ended(browser, chat_id)
    await asyncio.sleep(0.1)
    assert len(server.engine.turns) == 2
    assert "It was not sent" in text_of(page)
    assert rows(web_settings, "SELECT text FROM queued_message") == [("Two",)]


async def test_after_a_retry_that_went_well_it_is_sent(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    await browser.say(chat_id, "Two")
    turn.fail()
    page = await ended(browser, chat_id)
    await browser.post(f"/messages/{field(page, 'parent_id')}/retry")
    second = await server.engine.next_turn(1)
    second.say("uno")
    second.end()
    third = await server.engine.next_turn(2)
    third.say("dos")
    third.end()
    assert texts(await ended(browser, chat_id)) == ["One", "uno", "Two", "dos"]


async def test_it_waits_for_a_place_in_the_engine(browser: Browser, server: Server) -> None:
    server.engine.places = Places(1)
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    await browser.say(chat_id, "Two")
    taken: list[object] = []
    release = turn.reservation.release

    def released_and_taken_by_another() -> None:
        release()
        taken.append(server.engine.places.take())

    turn.reservation.release = released_and_taken_by_another  # type: ignore[method-assign]
    turn.end()
    page = await ended(browser, chat_id)
    assert "Queued: sent when the answer has ended." in text_of(page)
    refused = await browser.say(chat_id, "Three")
    assert refused.status_code == 409, "order is kept"
    taken[0].release()  # type: ignore[attr-defined]
    second = await server.engine.next_turn(1)
    second.end()
    assert texts(await ended(browser, chat_id))[2] == "Two"


async def test_one_that_does_not_fit_says_so(browser: Browser, server: Server) -> None:
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    await browser.say(chat_id, "x" * 300)
    server.engine.context_length = len(turn.submit.prefix_ids) + len(turn.submit.new_ids) + 100
    turn.end()
    page = await ended(browser, chat_id)
    assert "It was not sent: it brings the chat to" in text_of(page)
    refused = await browser.post(f"/chats/{chat_id}/queued/send", htmx=True)
    assert refused.status_code == 413
    assert "/carry-over" in refused.text


async def test_over_a_crash_it_is_held_and_over_a_restart_it_is_sent(
    web_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: object, chat_id: str) -> None: ...

    async with serving(web_settings, FakeEngine()) as server:
        cut, done = server.browser(), server.browser()
        async with cut, done:
            cut_id = await cut.new_chat("cut")
            await cut.say(cut_id, "after the cut")
            done_id = await done.new_chat("done")
            await done.say(done_id, "after the end")
            with monkeypatch.context() as patched:  # the end of the server comes in between
                queued = app.queued_messages.QueuedMessages
                patched.setattr(queued, "_advance", never)
                server.engine.turns[1].say("all of it")
                server.engine.turns[1].end()
                await until(lambda: len(server.app.state.services.hub.running()) == 1)
            cookies = [one.http.cookies for one in (cut, done)]
    async with serving(web_settings, FakeEngine()) as server:
        cut, done = server.browser(), server.browser()
        for one, jar in zip((cut, done), cookies, strict=True):
            one.http.cookies = jar
        async with cut, done:
            turn = await server.engine.next_turn(0)
            assert turn.submit.chat_id == done_id
            turn.say("sent")
            turn.end()
            assert texts(await ended(done, done_id)) == [
                "done", "all of it", "after the end", "sent",
            ]  # fmt: skip
            page = (await cut.get(f"/chats/{cut_id}")).text
            assert "It was not sent: the answer before it was interrupted." in text_of(page)
            assert "after the cut" in text_of(page)
            assert (
                await cut.post(f"/messages/{field(page, 'parent_id')}/retry")
            ).status_code == 303
            (await server.engine.next_turn(1)).end()
            (await server.engine.next_turn(2)).end()
            assert texts(await ended(cut, cut_id))[2] == "after the cut"


async def test_a_deleted_chat_sends_nothing(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await browser.new_chat("One")
    await server.engine.next_turn(0)
    await browser.say(chat_id, "Two")
    await browser.post(f"/chats/{chat_id}/delete")
    await until(lambda: not server.app.state.services.hub.running())
    await asyncio.sleep(0.1)
    assert len(server.engine.turns) == 1


async def test_messages_for_another_place_are_not_queued(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    stale = field(browser.page, "parent_id")
    await browser.say(chat_id, "Two")
    turn = await server.engine.next_turn(1)
    refused = await browser.post(
        f"/chats/{chat_id}/messages", {"text": "late", "parent_id": stale}, htmx=True
    )
    assert refused.status_code == 409
    assert "An answer of this chat is still being written." in text_of(refused.text)
    empty = await browser.say(chat_id, " \n", htmx=True)
    assert empty.status_code == 400
    turn.end()
    await ended(browser, chat_id)

"""A cut answer is gone on with in place; a full chat is carried over into a new one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from app.settings import Settings
from tests.app.fake_engine import CONTROL_TOKENS, FakeEngine, FakeTurn
from tests.app.talk import ended, exchange, messages, new_chat, rows, texts, until
from tests.app.web_client import Browser, Server, field, serving, text_of

pytestmark = pytest.mark.anyio


def ids_of(blob: bytes) -> list[int]:
    return [int.from_bytes(blob[i : i + 4], "little") for i in range(0, len(blob), 4)]


async def stopped_chat(browser: Browser, server: Server, said: str) -> tuple[str, FakeTurn]:
    """A chat whose answer was stopped after these words, and its turn."""
    number = len(server.engine.turns)
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(number)
    turn.say(said)
    await until(lambda: server.app.state.services.hub.running()[0].text == said)
    await browser.post(f"/turns/{turn.submit.request_id}/stop")
    await browser.get(f"/chats/{chat_id}")
    return chat_id, turn


async def test_the_model_goes_on_from_the_last_token(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id, first = await stopped_chat(browser, server, "uno, do")
    answer_id = field(browser.page, "parent_id")
    assert f"/messages/{answer_id}/continue" in browser.page
    on = await browser.post(f"/messages/{answer_id}/continue", htmx=True)
    assert texts(on.text) == ["One", "uno, do"], "what there was stays on the page"
    turn = await server.engine.next_turn(1)
    asked, answered = first.submit, turn.submit
    assert [*answered.history_ids, *answered.new_ids] == asked.new_ids + list(b"uno, do")
    assert answered.new_ids == list(b"o")
    assert answered.history_computed == len(answered.history_ids)
    assert answered.answered == len(b"uno, do")
    assert answered.sampling == asked.sampling, "the seed above all"
    turn.say("s, tres")
    await until(lambda: server.app.state.services.hub.running()[0].text == "uno, dos, tres")
    await server.app.state.services.upkeep.save_progress()
    assert ("uno, dos, tres", "running") in rows(web_settings, "SELECT text, status FROM message")
    turn.end()
    page = await ended(browser, chat_id)
    assert texts(page) == ["One", "uno, dos, tres"]
    assert "/continue" not in page
    [(text, blob)] = rows(
        web_settings, "SELECT text, token_ids FROM message WHERE role = 'assistant'"
    )
    assert (text, ids_of(blob)) == ("uno, dos, tres", list(b"uno, dos, tres"))
    times = (await browser.get(f"/messages/{messages(page)[1][0]}/timeline")).text
    assert times.count('class="timeline__turn"') == 2
    assert "Gone on with" in times


async def test_an_unfinished_character_is_finished(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    """The engine gives what it holds back at a stop; its tokens say what it was."""
    chat_id = await browser.new_chat("One")
    first = await server.engine.next_turn(0)
    first.say("é")
    euro = list("€".encode())
    first.push_ids(euro[:2], "")
    first.push_ids([], "\ufffd")
    await until(lambda: server.app.state.services.hub.running()[0].text == "é\ufffd")
    await browser.post(f"/turns/{first.submit.request_id}/stop")
    page = await ended(browser, chat_id)
    assert texts(page)[1] == "é\ufffd"
    await browser.post(f"/messages/{field(page, 'parent_id')}/continue")
    turn = await server.engine.next_turn(1)
    assert turn.submit.answered == 4
    turn.push_ids(euro[2:], "€")
    turn.end()
    assert texts(await ended(browser, chat_id))[1] == "é€"
    [(blob,)] = rows(web_settings, "SELECT token_ids FROM message WHERE role = 'assistant'")
    assert ids_of(blob) == list("é€".encode())


async def test_what_may_become_a_stop_string_is_held_back_again(
    browser: Browser, server: Server, web_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = server.app.state.services
    sampling_of = services.chat._prompts._sampling_of

    async def with_stop(chat: Any) -> Any:
        import msgspec

        return msgspec.structs.replace(await sampling_of(chat), stop=("END",))

    monkeypatch.setattr(services.chat._prompts, "_sampling_of", with_stop)
    chat_id = await new_chat(browser, server, "One", "uno")
    await browser.say(chat_id, "Two")
    first = await server.engine.next_turn(1)
    first.push_ids(list(b"dos EN"), "dos ")
    first.push_ids([], "EN")
    await until(lambda: services.hub.running()[0].text == "dos EN")
    await browser.post(f"/turns/{first.submit.request_id}/stop")
    page = await ended(browser, chat_id)
    assert texts(page)[3] == "dos EN"
    await browser.post(f"/messages/{field(page, 'parent_id')}/continue")
    turn = await server.engine.next_turn(2)
    assert turn.submit.sampling.stop == ("END",)
    assert services.hub.running()[0].text == "dos "
    turn.push_ids(list(b"D"), "")
    turn.end("stop")
    await ended(browser, chat_id)
    last = rows(web_settings, "SELECT text, token_ids, finish_reason FROM message")[-1]
    assert (last[0], ids_of(last[1]), last[2]) == ("dos ", list(b"dos END"), "stop")


async def test_an_answer_at_its_length_limit_can_be_gone_on_with(
    browser: Browser, server: Server
) -> None:
    chat_id = await browser.new_chat("One")
    turn = await server.engine.next_turn(0)
    turn.say("uno")
    turn.end("length")
    page = await ended(browser, chat_id)
    assert "The answer reached the length limit." in page
    assert "/continue" in page
    assert "/retry" not in page


async def test_what_the_model_ended_or_never_began_is_not_gone_on_with(
    browser: Browser, server: Server
) -> None:
    await new_chat(browser, server, "One", "uno")
    answer_id = field(browser.page, "parent_id")
    refused = await browser.post(f"/messages/{answer_id}/continue", htmx=True)
    assert refused.status_code == 409
    assert "only when it was cut short" in refused.text
    chat_id, _ = await stopped_chat(browser, server, "")
    assert "/continue" not in browser.page
    empty = await browser.post(f"/messages/{field(browser.page, 'parent_id')}/continue")
    assert empty.status_code == 409
    assert len(server.engine.turns) == 2
    assert texts((await browser.get(f"/chats/{chat_id}")).text) == ["One", ""]


async def test_it_goes_on_after_a_restart(web_settings: Settings) -> None:
    async with serving(web_settings, FakeEngine()) as server, server.browser() as browser:
        chat_id = await browser.new_chat("One")
        turn = await server.engine.next_turn(0)
        turn.say("so far")
        await until(lambda: server.app.state.services.hub.running()[0].text == "so far")
        cookies = browser.http.cookies
    async with serving(web_settings, FakeEngine()) as server, server.browser() as browser:
        browser.http.cookies = cookies
        page = (await browser.get(f"/chats/{chat_id}")).text
        assert 'data-status="interrupted"' in page
        assert "/retry" in page
        await browser.post(f"/messages/{field(page, 'parent_id')}/continue")
        turn = await server.engine.next_turn(0)
        assert turn.submit.answered == len("so far")
        turn.say(" so good")
        turn.end()
        assert texts(await ended(browser, chat_id)) == ["One", "so far so good"]


async def test_a_full_chat_offers_to_carry_its_last_exchanges_over(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    server.engine.context_length = 100_000
    chat_id = await new_chat(browser, server, "first " * 20, "uno " * 20)
    old = server.engine.turns[0].submit
    for number in range(3):
        await exchange(browser, server, chat_id, f"question {number}", f"answer {number}")
    assert "/carry-over" not in browser.page
    [(used,)] = rows(web_settings, "SELECT sum(length(token_ids) / 4) FROM message")
    server.engine.context_length = int((len(old.prefix_ids) + used) / 0.8)
    page = (await browser.get(f"/chats/{chat_id}")).text
    assert f'formaction="/chats/{chat_id}/carry-over"' in page
    # Half of this context holds the prefix, two exchanges, and a little more.
    per_exchange = len(server.engine.turns[-1].submit.new_ids) + len("answer 2")
    server.engine.context_length = 2 * (len(old.prefix_ids) + 2 * per_exchange + 3)
    carried = await browser.post(f"/chats/{chat_id}/carry-over")
    assert carried.status_code == 303
    path = carried.headers["location"]
    assert path != f"/chats/{chat_id}"
    page = (await browser.get(path)).text
    assert texts(page) == ["question 1", "answer 1", "question 2", "answer 2"]
    words = " ".join(text_of(page).split())
    assert "the last 2 of its 4 exchanges were carried over" in words
    assert f'href="/chats/{chat_id}"' in page
    twice = await browser.post(f"/chats/{chat_id}/carry-over")
    assert twice.headers["location"] == path, "the same form leads to the same chat"
    new_id = path.removeprefix("/chats/")
    server.engine.context_length = 100_000
    assert (await browser.say(new_id, "next")).status_code == 303
    turn = await server.engine.next_turn(4)
    assert turn.submit.prefix_ids == old.prefix_ids
    assert turn.submit.history_computed == 0, "nothing of the new chat was run before"
    first_ids = old.new_ids[: old.new_ids.index(ord("f"))]
    assert turn.submit.history_ids[: len(first_ids)] == first_ids, "it opens as a first message"
    text = bytes(token for token in turn.submit.history_ids if token < 256).decode()
    assert text == "user\nquestion 1\nassistant\nanswer 1\nuser\nquestion 2\nassistant\nanswer 2"
    assert turn.submit.new_ids[0] == CONTROL_TOKENS["<|im_end|>"]
    turn.say("yes")
    turn.end()
    page = await ended(browser, new_id)
    assert texts(page)[-2:] == ["next", "yes"]
    await browser.post(f"/chats/{chat_id}/delete")
    assert "goes on from a chat that was deleted" in " ".join(
        text_of((await browser.get(path)).text).split()
    )


async def test_a_message_without_room_is_sent_in_the_new_chat(
    browser: Browser, server: Server
) -> None:
    server.engine.context_length = 100_000
    chat_id = await new_chat(browser, server, "One " * 50, "uno " * 50)
    old = server.engine.turns[0].submit
    full = len(old.prefix_ids) + len(old.new_ids) + 4 * 50
    server.engine.context_length = full + 30
    refused = await browser.say(chat_id, "And then? " * 5)
    assert refused.status_code == 413
    form = re.search(r'<form class="problem__carry".*?</form>', refused.text, re.DOTALL)
    assert form is not None
    assert f'action="/chats/{chat_id}/carry-over"' in form[0]
    assert "\nAnd then? And then? " in form[0], "without scripts the form has the text"
    fields = {"text": "And then? " * 5}
    carried = await browser.post(f"/chats/{chat_id}/carry-over", fields, htmx=True)
    path = carried.headers["hx-redirect"]
    turn = await server.engine.next_turn(1)
    turn.say("then")
    turn.end()
    page = await ended(browser, path.removeprefix("/chats/"))
    assert texts(page) == ["And then? " * 4 + "And then?", "then"]
    assert "nothing of it fitted in here" in " ".join(text_of(page).split())
    again = await browser.post(f"/chats/{chat_id}/carry-over", fields, htmx=True)
    assert again.headers["hx-redirect"] == path
    assert len(server.engine.turns) == 2, "and it is not sent twice"


async def test_nothing_is_carried_over_while_an_answer_runs(
    browser: Browser, server: Server
) -> None:
    chat_id = await browser.new_chat("One")
    refused = await browser.post(f"/chats/{chat_id}/carry-over", htmx=True)
    assert refused.status_code == 409
    (await server.engine.next_turn(0)).end()
    await ended(browser, chat_id)
    assert messages(browser.page)

"""Asking otherwise and answering again make branches; the chat remembers which one is shown."""

from __future__ import annotations

import re

import pytest

from app.settings import Settings
from tests.app.talk import ended, exchange, messages, new_chat, rows, texts
from tests.app.web_client import HTMX, Browser, Server, field, text_of

pytestmark = pytest.mark.anyio


def versions(page: str) -> list[str]:
    """Of each message that has several, which one is shown."""
    return re.findall(r'<span class="branch__place">([^<]*)</span>', page)


def ways(page: str) -> list[str]:
    """The ids of the versions that the page leads to."""
    return re.findall(r'formaction="/messages/([0-9a-f]{32})/select"', page)


async def test_an_edited_message_is_a_branch_and_both_can_be_gone_to(
    browser: Browser, server: Server
) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    await exchange(browser, server, chat_id, "Two", "dos")
    first = server.engine.turns[0].submit
    second_id = messages(browser.page)[2][0]
    edited = await browser.post(f"/messages/{second_id}/edit", {"edited": "Zwei"})
    assert edited.status_code == 303
    turn = await server.engine.next_turn(2)
    assert turn.submit.history_ids == first.new_ids + list(b"uno")
    assert b"Zwei" in bytes(token for token in turn.submit.new_ids if token < 256)
    turn.say("zwei!")
    turn.end()
    page = await ended(browser, chat_id)
    assert texts(page) == ["One", "uno", "Zwei", "zwei!"]
    assert versions(page) == ["2 / 2"]
    assert ways(page) == [second_id]
    moved = await browser.post(f"/messages/{second_id}/select")
    assert moved.headers["location"] == f"/chats/{chat_id}#message-{second_id}"
    page = (await browser.get(f"/chats/{chat_id}")).text
    assert texts(page) == ["One", "uno", "Two", "dos"]
    assert versions(page) == ["1 / 2"]
    # The chat goes on from the branch that is shown.
    await exchange(browser, server, chat_id, "Three", "tres")
    assert texts(browser.page) == ["One", "uno", "Two", "dos", "Three", "tres"]
    last = server.engine.turns[-1].submit
    assert b"dos" in bytes(token for token in last.history_ids if token < 256)
    assert b"zwei!" not in bytes(token for token in last.history_ids if token < 256)


async def test_the_first_message_can_be_edited(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    original = server.engine.turns[0].submit
    [(first_id, _, _), _] = messages(browser.page)
    await browser.post(f"/messages/{first_id}/edit", {"edited": "Eins"})
    turn = await server.engine.next_turn(1)
    assert turn.submit.history_ids == []
    assert turn.submit.prefix_ids == original.prefix_ids
    assert turn.submit.new_ids[:1] == original.new_ids[:1], "it opens as a first message does"
    turn.end()
    assert versions(await ended(browser, chat_id)) == ["2 / 2"]


async def test_answers_again_in_the_middle_keep_what_followed(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    await exchange(browser, server, chat_id, "Two", "dos")
    answer_id = messages(browser.page)[1][0]
    response = await browser.post(f"/messages/{answer_id}/again", htmx=True)
    assert response.status_code == 200
    assert '<hx-partial hx-target="#composer-controls"' in response.text
    turn = await server.engine.next_turn(2)
    assert turn.submit.new_ids == server.engine.turns[0].submit.new_ids
    turn.say("ein")
    turn.end()
    page = await ended(browser, chat_id)
    assert texts(page) == ["One", "ein"]
    assert field(page, "parent_id") == messages(page)[1][0]
    assert len(rows(web_settings, "SELECT id FROM message")) == 5
    back = await browser.post(f"/messages/{answer_id}/select", htmx=True)
    assert texts(back.text) == ["One", "uno", "Two", "dos"]
    assert versions(back.text) == ["1 / 2"]


async def test_edits_of_what_is_not_shown_any_more_change_nothing(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    [(first_id, _, _), (answer_id, _, _)] = messages(browser.page)
    await browser.post(f"/messages/{first_id}/edit", {"edited": "Eins"})
    (await server.engine.next_turn(1)).end()
    await ended(browser, chat_id)
    before = rows(web_settings, "SELECT id FROM message")
    for path, fields in (
        (f"/messages/{first_id}/edit", {"edited": "stale"}),
        (f"/messages/{answer_id}/again", {}),
        (f"/messages/{answer_id}/edit", {"edited": "an answer"}),
        (f"/messages/{answer_id}/retry", {}),
        (f"/messages/{answer_id}/continue", {}),
    ):
        refused = await browser.post(path, fields, htmx=True)
        assert refused.status_code == 409, path
        assert refused.headers["hx-retarget"] == "#notice"
    as_page = await browser.post(f"/messages/{first_id}/edit", {"edited": "stale"})
    assert as_page.status_code == 409
    assert ">\nstale</textarea>" in as_page.text
    assert "went on in another tab" in as_page.text
    assert rows(web_settings, "SELECT id FROM message") == before
    assert server.engine.places.in_use == 0


async def test_while_an_answer_runs_its_chat_keeps_its_branch(
    browser: Browser, server: Server
) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    [(first_id, _, _), (answer_id, _, _)] = messages(browser.page)
    await browser.post(f"/messages/{answer_id}/again")
    turn = await server.engine.next_turn(1)
    for path, fields in (
        (f"/messages/{answer_id}/select", {}),
        (f"/messages/{answer_id}/again", {}),
        (f"/messages/{first_id}/edit", {"edited": "now"}),
    ):
        refused = await browser.post(path, fields, htmx=True)
        assert refused.status_code == 409
        assert "An answer of this chat is still being written." in text_of(refused.text)
    turn.end()
    await ended(browser, chat_id)
    assert (await browser.post(f"/messages/{answer_id}/select")).status_code == 303


@pytest.mark.parametrize("text", ["", "  \n", "a\0b", "x" * 100_001])
async def test_bad_edits_are_refused_with_the_text_kept(
    browser: Browser, server: Server, text: str
) -> None:
    await new_chat(browser, server, "One", "uno")
    [(first_id, _, _), _] = messages(browser.page)
    refused = await browser.post(f"/messages/{first_id}/edit", {"edited": text}, htmx=True)
    assert refused.status_code == 400
    assert len(server.engine.turns) == 1


async def test_the_stored_text_can_be_read_exactly(browser: Browser, server: Server) -> None:
    said = "  # Not HTML\n\n<b>&amp;</b>\t\n"
    await new_chat(browser, server, "  Q?\r\n", said)
    [(question_id, _, _), (answer_id, _, _)] = messages(browser.page)
    answer = await browser.http.get(f"/messages/{answer_id}/text", headers=HTMX)
    assert answer.text == said
    assert answer.headers["content-type"].startswith("text/plain")
    assert (await browser.http.get(f"/messages/{question_id}/text")).text == "  Q?\n"


async def test_what_opens_at_a_message_is_a_part_and_a_page(
    browser: Browser, server: Server
) -> None:
    text = "\n <b>Q</b> & more\n"
    chat_id = await new_chat(browser, server, text, "uno")
    [(question_id, _, _), (answer_id, _, _)] = messages(browser.page)
    for path, needle in (
        (f"/messages/{question_id}/edit", ">\n\n &lt;b&gt;Q&lt;/b&gt; &amp; more\n</textarea>"),
        (f"/messages/{answer_id}/again", '<button class="button button--small" type="submit"'),
        (f"/messages/{answer_id}/timeline", 'class="timeline__step timeline__step--first"'),
    ):
        assert f'href="{path}"' in (await browser.get(f"/chats/{chat_id}")).text
        part = await browser.http.get(path, headers=HTMX)
        page = await browser.get(path)
        assert (part.status_code, page.status_code) == (200, 200)
        assert part.text in page.text or path.endswith(("edit", "again")), "they have a token"
        assert needle in part.text
        assert needle in page.text
        assert ("<html" in part.text, "<html" in page.text) == (False, True)
        assert f'href="/chats/{chat_id}#message-' in page.text
        assert "HX-Request" in part.headers["vary"]
    for path in (f"/messages/{answer_id}/edit", f"/messages/{question_id}/again"):
        assert (await browser.get(path)).status_code == 404


async def test_a_form_on_a_page_of_its_own_is_sent_as_it_stands(
    browser: Browser, server: Server
) -> None:
    chat_id = await new_chat(browser, server, "One", "uno")
    [(question_id, _, _), (answer_id, _, _)] = messages(browser.page)
    await browser.get(f"/messages/{answer_id}/again")
    assert (await browser.post(f"/messages/{answer_id}/again", {"answers": "2"})).status_code == 303
    for number in (1, 2):
        (await server.engine.next_turn(number)).end()
    assert 'class="candidates candidates--2"' in await ended(browser, chat_id)
    await browser.get(f"/messages/{question_id}/edit")
    assert (await browser.post(f"/messages/{question_id}/edit", {"edited": "E"})).status_code == 303
    (await server.engine.next_turn(3)).end()
    assert texts(await ended(browser, chat_id))[0] == "E"


async def test_a_long_message_is_shown_in_part(browser: Browser, server: Server) -> None:
    await new_chat(browser, server, "short", "a")
    assert "message__body--long" not in browser.page
    text = "word " * 600
    await new_chat(browser, server, text, "b")
    assert "message__body--long" in browser.page
    assert "Show all 3,000 characters" in text_of(browser.page)
    assert texts(browser.page)[0] == text.strip(), "all of it is there"


async def test_nobody_else_can_do_anything_with_a_message(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await new_chat(browser, server, "Mine alone", "uno")
    [(question_id, _, _), (answer_id, _, _)] = messages(browser.page)
    turn_id = server.engine.turns[0].submit.request_id
    before = rows(web_settings, "SELECT id, active_leaf_id FROM chat"), len(server.engine.turns)
    async with server.browser() as nobody, server.browser() as stranger:
        await new_chat(stranger, server, "a chat of their own", "x")
        engine_turns = len(server.engine.turns)
        for other in (nobody, stranger):
            for path in (
                f"/messages/{question_id}/edit",
                f"/messages/{answer_id}/again",
                f"/messages/{answer_id}/retry",
                f"/messages/{answer_id}/continue",
                f"/messages/{answer_id}/select",
                f"/chats/{chat_id}/carry-over",
                f"/chats/{chat_id}/queued/withdraw",
                f"/chats/{chat_id}/queued/send",
            ):
                for htmx in (False, True):
                    refused = await other.post(path, {"edited": "x", "text": "x"}, htmx=htmx)
                    assert refused.status_code == 404, path
                    assert "Mine alone" not in refused.text
            for path in (
                f"/messages/{answer_id}/text",
                f"/messages/{answer_id}/again",
                f"/messages/{answer_id}/timeline",
                f"/messages/{question_id}/edit",
                f"/turns/{turn_id}/candidates",
            ):
                assert (await other.get(path)).status_code == 404
        assert len(server.engine.turns) == engine_turns
    assert rows(web_settings, "SELECT id, active_leaf_id FROM chat")[:1] == before[0]

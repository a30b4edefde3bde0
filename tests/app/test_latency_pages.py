"""The latency pages: what they say of each turn, and that they reconcile."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from app.latency_charts import turn_charts
from app.settings import Settings
from app.turn_rows import turn_views
from sessions.latency_records import TurnRecord
from tests.app.fake_engine import FakeTurn
from tests.app.talk import ended, new_chat
from tests.app.web_client import Browser, Server, text_of

pytestmark = pytest.mark.anyio

SPANS = [
    ("read", 2.0, 12.0, 64, 30),
    ("compute", 12.0, 16.0, 64, 30),
    ("read", 12.0, 22.0, 64, 30),
    ("recompute", 22.0, 42.0, 64, 3),
]


def cells(page: str, caption: str) -> dict[str, list[str]]:
    """A table of a page: the head of each row to its cells."""
    [table] = [one for one in re.findall(r"<table.*?</table>", page, re.S) if caption in one]
    found = {}
    for row in re.findall(r"<tr[^>]*>.*?</tr>", table, re.S):
        head = re.search(r'<th scope="row"[^>]*>(.*?)</th>', row, re.S)
        if head is not None:
            found[text_of(head[1])] = [
                text_of(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)
            ]
    return found


async def test_a_chats_page_tells_where_each_turns_time_went(
    browser: Browser, server: Server
) -> None:
    chat_id = await new_chat(browser, server, "very private words", "An answer.")
    await browser.say(chat_id, "again")
    turn = await server.engine.next_turn(1)
    turn.say("An answer.")
    turn.end(restore_spans=SPANS)
    await ended(browser, chat_id)
    page = (await browser.get(f"/chats/{chat_id}/latency")).text
    assert f'data-latency-src="/chats/{chat_id}/latency.json?page=1"' in page
    ids = re.findall(r'data-chart="([^"]+)"', page)
    data = (await browser.get(f"/chats/{chat_id}/latency.json")).json()
    assert [chart["id"] for chart in data["charts"]] == ids
    charts = {chart["id"]: chart for chart in data["charts"]}
    tokens = {one["label"]: one["values"] for one in charts["tokens"]["series"]}
    assert tokens == {
        "shared prefix": [1012, 1012],
        "in memory": [64, 64],
        "restored": [1204, 1204],
        "recomputed": [0, 0],
        "new": [20, 20],
    }
    prediction = {one["label"]: one["values"] for one in charts["prediction"]["series"]}
    assert prediction == {"measured": [38.2, 38.2], "predicted": [36.4, 36.4]}
    words = re.sub(r"\s+", " ", text_of(page))
    assert words.index("Turn 2") < words.index("Turn 1 restored"), "the latest first"
    assert "3 recompute + 1 hidden + 26 kv" in words
    assert "disk 20 ms computing 4 ms recomputing 20 ms" in words
    card = re.search(r'<li class="turn" id="turn-2">.*?</ol>', page, re.S)
    assert card is not None
    # Over the 40 ms of the restore: two reads of 10 ms each, one behind the other.
    assert re.findall(r'gantt__span--read" x="(\d+)" width="(\d+)"', card[0])[:2] == [
        ("0", "250"),
        ("250", "250"),
    ]
    assert re.findall(r'gantt__span--recompute" x="(\d+)" width="(\d+)"', card[0]) == [
        ("500", "500")
    ]


async def test_turns_are_paged_and_numbered_through(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await new_chat(browser, server, "Hello", "An answer.")
    add_turns(web_settings, chat_id, 119)
    newest = (await browser.get(f"/chats/{chat_id}/latency")).text
    assert "Turns 71 to 120 of 120" in text_of(newest)
    assert newest.count('<li class="turn"') == 50
    assert 'id="turn-120"' in newest
    oldest = (await browser.get(f"/chats/{chat_id}/latency?page=3")).text
    assert re.findall(r'<li class="turn" id="turn-(\d+)"', oldest) == [
        str(number) for number in range(20, 0, -1)
    ]
    assert "Older turns" not in oldest
    charts = (await browser.get(f"/chats/{chat_id}/latency.json?page=3")).json()["charts"]
    assert charts[0]["x"] == list(range(1, 21))
    for wrong in ("0", "4", "-1"):
        assert (await browser.get(f"/chats/{chat_id}/latency?page={wrong}")).status_code == 404
    assert (await browser.get(f"/chats/{chat_id}/latency?page=x")).status_code == 400


async def test_every_turn_has_a_first_token_or_a_reason(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await new_chat(browser, server, "Hello", "An answer.")
    ends: dict[str, tuple[str, Callable[[FakeTurn], None]]] = {
        "stopped early": ("", lambda turn: turn.end("cancelled", ttft_ms=None, tokens_out=0)),
        "stopped": ("Some", lambda turn: turn.end("cancelled")),
        "failed": ("", lambda turn: turn.fail()),
        "died early": ("", lambda turn: turn.fail("engine_died", "It died.")),
        "died": ("Some", lambda turn: turn.fail("engine_died", "It died.")),
        "empty": ("", lambda turn: turn.end(ttft_ms=None, tokens_out=0)),
    }
    for number, (name, (said, end)) in enumerate(ends.items(), start=1):
        other = await browser.new_chat(name)
        turn = await server.engine.next_turn(number)
        if said:
            turn.say(said)
        end(turn)
        await ended(browser, other)
    running = await browser.new_chat("runs")
    await server.engine.next_turn(len(ends) + 1)
    reasons: dict[str, list[object]] = {}
    for row in await download(browser, "/latency/turns.json"):
        reasons.setdefault(row["without_first_token"], []).append(row["first_token_ms"])
    assert {reason: len(found) for reason, found in reasons.items()} == {
        "": 3,
        "stopped before the first token": 1,
        "failed": 1,
        "interrupted": 1,
        "the answer is empty": 1,
        "still running": 1,
    }
    assert all((value is None) == bool(reason) for reason, [value, *_] in reasons.items())
    page = (await browser.get("/latency")).text
    assert cells(page, "Every turn has a first token") == {
        "With a first token": ["3"],
        "None: stopped before the first token": ["1"],
        "None: failed": ["1"],
        "None: interrupted": ["1"],
        "None: the answer is empty": ["1"],
        "None: still running": ["1"],
        "Turns, those running included": ["8"],
    }
    with closing(sqlite3.connect(web_settings.database_path)) as db:
        assert db.execute("SELECT COUNT(*) FROM turn").fetchone() == (8,)
    own = text_of((await browser.get(f"/chats/{running}/latency")).text)
    assert "No first token: still running." in own
    assert chat_id


async def test_the_operators_page_sums_up_and_names_nobody(
    browser: Browser, server: Server
) -> None:
    chat_id = await new_chat(browser, server, "very private words", "An answer.")
    page = (await browser.get("/latency")).text
    assert "KV is smaller than hidden states here." in page
    main = page.partition("<main")[2]
    for private in ("very private words", chat_id):
        assert private not in main
    percentiles = cells(page, "Percentiles")
    assert percentiles["Restoring"][0] == "1"
    assert all(36 < float(value.removesuffix(" ms")) < 40 for value in percentiles["Restoring"][1:])
    assert percentiles["First token, first turns"] == ["0", "\N{EN DASH}"] + ["\N{EN DASH}"] * 2
    assert percentiles["Restoring, of what was predicted"][1].endswith(" %")
    assert cells(page, "What was restored")["kv"][:2] == ["1", "1,204"]
    data = (await browser.get("/latency.json")).json()
    assert data["summary"]["shared_tokens"] == 1012
    assert data["summary"]["shared_bytes"] == 1012 * 8
    assert chat_id not in json.dumps(data)
    for span in ("hour", "day", "week", "month", "all"):
        one = (await browser.get(f"/latency.json?span={span}")).json()
        assert one["summary"]["turns"] == 1, span
        [bars] = [chart for chart in one["charts"] if chart["id"] == "server-turns"]
        assert sum(sum(series["values"]) for series in bars["series"]) == 1, span
    assert (await browser.get("/latency?span=year")).status_code == 404


async def test_downloads_have_every_turn_and_no_owner(
    browser: Browser, server: Server, web_settings: Settings
) -> None:
    chat_id = await new_chat(browser, server, "Hello", "An answer.")
    add_turns(web_settings, chat_id, 1203)
    for path in ("/latency/turns", f"/chats/{chat_id}/latency/turns"):
        response = await browser.get(f"{path}.csv")
        assert "attachment" in response.headers["content-disposition"]
        rows = list(csv.DictReader(io.StringIO(response.text)))
        assert len(rows) == 1204
        assert rows[0]["restored_tokens"] == "1204"
        assert len({row["started_at"] for row in rows}) == 1204
        assert [row["started_at"] for row in rows] == sorted(row["started_at"] for row in rows)
        objects = await download(browser, f"{path}.json")
        assert len(objects) == 1204
        assert objects[0]["restore_predicted_ms"] == 36.4
        assert chat_id not in response.text
    async with server.browser() as stranger:
        assert (await stranger.get(f"/chats/{chat_id}/latency/turns.csv")).status_code == 404


async def test_an_empty_server_has_an_empty_page(browser: Browser) -> None:
    for span in ("day", "all"):
        page = text_of((await browser.get(f"/latency?span={span}")).text)
        assert "Nothing was restored." in page
        assert "Nothing measured yet." in page
    assert (await browser.get("/latency/turns.json")).json() == []


async def test_charts_leave_out_what_was_not_measured() -> None:
    cut_off = TurnRecord(
        turn_id="t",
        chat_id="c",
        message_id="m",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        ended_at=None,
        outcome="interrupted",
        first_token_ms=77.0,
        latency=None,
    )
    charts = {chart.id: chart for chart in turn_charts([cut_off], first=5)}
    assert charts["first-token"].x == [5.0]
    assert {one.label: one.values for one in charts["first-token"].series}["interrupted"] == [77.0]
    assert all(one.values == [None] for one in charts["tokens"].series)
    [view] = turn_views([cut_off], first=5)
    assert (view.number, view.kind, view.without, view.rows) == (5, "not measured", "", ())


async def download(browser: Browser, path: str) -> list[dict[str, Any]]:
    return list((await browser.get(path)).json())


def add_turns(settings: Settings, chat_id: str, number: int) -> None:
    """Copies of the chat's first turn, a second apart."""
    with closing(sqlite3.connect(settings.database_path)) as db, db:
        turn = [row[1] for row in db.execute("PRAGMA table_info(turn)")]
        latency = [row[1] for row in db.execute("PRAGMA table_info(turn_latency)")]
        for n in range(1, number + 1):
            changed = {
                "id": f"'{n:032x}'",
                "created_at": f"strftime('%Y-%m-%d %H:%M:%f000', created_at, '-{n} seconds')",
            }
            columns = ", ".join(changed.get(name, name) for name in turn)
            db.execute(
                f"INSERT INTO turn SELECT {columns} FROM turn WHERE chat_id = ?"
                " AND id NOT LIKE '000%' LIMIT 1",
                (chat_id,),
            )
            columns = ", ".join(f"'{n:032x}'" if name == "turn_id" else name for name in latency)
            db.execute(
                f"INSERT INTO turn_latency SELECT {columns} FROM turn_latency"
                " WHERE turn_id NOT LIKE '000%' LIMIT 1"
            )

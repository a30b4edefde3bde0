"""The figures for Prometheus: right, closed to others, and about nobody."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.security.login import hash_token
from app.settings import Settings
from tests.app.fake_engine import FakeEngine
from tests.app.talk import ended, new_chat
from tests.app.web_client import Browser, Server, serving

pytestmark = pytest.mark.anyio

CANARY = "canary-7f3a"


def figures(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(
    found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str
) -> float:
    """The sum of a name's samples that have these labels."""
    return sum(
        number
        for (one, given), number in found.items()
        if one == name and set(labels.items()) <= given
    )


async def test_turns_are_counted_by_what_became_of_them(browser: Browser, server: Server) -> None:
    chat_id = await new_chat(browser, server, CANARY, f"An answer with {CANARY}.")
    await browser.say(chat_id, "again")
    failing = await server.engine.next_turn(1)
    failing.fail()
    await ended(browser, chat_id)
    await browser.get(f"/search?q={CANARY}")
    response = await browser.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = figures(response.text)
    assert value(found, "rejoinder_request_success_total", finished_reason="eos") == 1
    assert value(found, "rejoinder_request_failure_total", kind="internal") == 1
    name = "gen_ai_server_request_duration_seconds_count"
    assert value(found, name, gen_ai_operation_name="chat") == 2
    assert value(found, name, error_type="internal") == 1
    assert value(found, "gen_ai_server_time_to_first_token_seconds_count") == 1
    per_token = "gen_ai_server_time_per_output_token_seconds_sum"
    assert value(found, per_token) == pytest.approx((500 - 60) / 2 / 1e3)
    sources = {"prefix_shared": 1012, "resident": 64, "restored": 1204, "recomputed": 0, "new": 20}
    for source, tokens in sources.items():
        assert value(found, "rejoinder_prompt_tokens_total", source=source) == tokens
    assert value(found, "rejoinder_restored_tokens_total", method="kv") == 1204
    assert value(found, "rejoinder_restore_seconds_total", method="kv") == pytest.approx(0.0382)
    assert value(found, "rejoinder_restore_bytes_total", method="kv") == 4096
    ratio = value(found, "rejoinder_restore_predicted_over_measured_sum")
    assert ratio == pytest.approx(36.4 / 38.2)
    assert value(found, "rejoinder_engine_up") == 1
    assert value(found, "rejoinder_num_requests_open") == 0
    assert value(found, "rejoinder_draining") == 0
    for gauge in ("checkpoint_disk_bytes", "checkpoint_disk_cap_bytes", "kv_cache_usage_perc"):
        assert any(name == f"rejoinder_{gauge}" for name, _ in found), gauge
    assert any(name == "rejoinder_checkpoint_staging_drops_total" for name, _ in found)
    requests = "http_server_request_duration_seconds_count"
    assert value(found, requests, http_route="/chats/{chat_id}", http_request_method="GET") >= 1
    for private in (CANARY, chat_id):
        assert private not in response.text
    routes = {dict(labels).get("http_route", "") for _, labels in found}
    assert not [route for route in routes if re.search(r"[0-9a-f]{32}|[?=]", route)]


async def test_what_is_asked_for_adds_no_series(browser: Browser) -> None:
    for number in range(5):
        await browser.get(f"/no/such/page-{number}")
        await browser.http.request(f"STRANGE{number}", "/")
    first = figures((await browser.get("/metrics")).text)
    for number in range(5, 15):
        await browser.get(f"/no/such/page-{number}")
        await browser.http.request(f"STRANGE{number}", "/")
    again = figures((await browser.get("/metrics")).text)
    assert len(again) <= len(first) + 20  # those of /metrics itself
    assert value(again, "http_server_request_duration_seconds_count", http_route="none") >= 10


async def test_an_engine_that_does_not_answer_is_told(browser: Browser, server: Server) -> None:
    server.engine.alive = False
    found = figures((await browser.get("/metrics")).text)
    assert value(found, "rejoinder_engine_up") == 0
    assert not [name for name, _ in found if name == "rejoinder_num_requests_running"]


@pytest.fixture
async def public(web_settings: Settings, fake_engine: FakeEngine) -> AsyncIterator[Server]:
    """A server that asks for accounts."""
    settings = web_settings.model_copy(update={"public_url": "http://127.0.0.1:9999"})
    async with serving(settings, fake_engine) as running:
        yield running


async def test_only_operators_read_figures_and_latency(public: Server) -> None:
    repository = public.app.state.services.repository
    people = {}
    for name, operator in (("ada", True), ("bob", False)):
        user = await repository.create_user(hash_token(f"login of {name}"))
        with closing(sqlite3.connect(public.app.state.services.settings.database_path)) as db, db:
            db.execute(
                "UPDATE user SET name = ?, is_operator = ? WHERE id = ?", (name, operator, user.id)
            )
        key = f"sk-{name}"
        await repository.create_api_key("k", hash_token(key), "...", user_id=user.id)
        people[name] = key
    async with Browser(public.url) as nobody:
        for path in ("/metrics", "/latency", "/latency.json", "/latency/turns.csv"):
            assert (await nobody.get(path)).status_code in (401, 303), path
        for given, status in (
            ({"Authorization": f"Bearer {people['ada']}"}, 200),
            ({"Authorization": f"Bearer {people['bob']}"}, 403),
            ({"Authorization": "Bearer sk-none"}, 401),
            ({"Authorization": people["ada"]}, 401),
        ):
            response = await nobody.http.get("/metrics", headers=given)
            assert response.status_code == status, given
        for path in ("/healthz", "/health", "/readyz"):
            assert (await nobody.get(path)).status_code == 200, path


async def test_a_disk_that_takes_no_checkpoints_is_told(browser: Browser, server: Server) -> None:
    assert (await browser.get("/health")).json()["checkpoint_trouble"] is None
    server.engine.write_trouble = "No space left on device"
    told = await browser.get("/health")
    assert told.status_code == 200  # chats are answered all the same
    assert told.json()["checkpoint_trouble"] == "No space left on device"

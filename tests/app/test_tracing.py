"""Traces of requests: one span each, named by its route, about nobody."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import app.main
from app.settings import Settings, SettingsError, load_settings
from app.tracing import TracesUnavailable, tracing
from tests.app.fake_engine import FakeEngine
from tests.app.talk import new_chat
from tests.app.web_client import serving

pytestmark = pytest.mark.anyio

CANARY = "canary-5d21"


async def _spans(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Sequence[ReadableSpan]:
    """Those of a chat, a search and a page that is not there, after the server's end."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(app.main, "tracing", functools.partial(tracing, exporter=exporter))
    traced = settings.model_copy(update={"otlp_endpoint": "http://127.0.0.1:9"})
    async with serving(traced, FakeEngine()) as server, server.browser() as browser:
        browser.http.headers["user-agent"] = CANARY
        chat_id = await new_chat(browser, server, CANARY, f"An answer with {CANARY}.")
        await browser.get(f"/search?q={CANARY}")
        await browser.get(f"/invitations/{CANARY}")
        assert (await browser.get(f"/chats/{CANARY}")).status_code == 404
    assert chat_id
    return exporter.get_finished_spans()


async def test_spans_are_named_by_routes_and_say_nothing_of_people(
    web_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = await _spans(web_settings, monkeypatch)
    names = [span.name for span in spans]
    assert {"GET /", "POST /chats", "GET /search"} <= set(names)
    assert any(name.startswith("GET /chats/{chat_id") for name in names)
    [search] = [span for span in spans if span.name == "GET /search"]
    attributes = search.attributes or {}
    assert 200 in (attributes.get("http.status_code"), attributes.get("http.response.status_code"))
    told = json.dumps([[span.name, dict(span.attributes or {})] for span in spans])
    assert CANARY not in told
    assert "127.0.0.1" not in told


async def test_no_endpoint_no_traces() -> None:
    assert tracing("") == []


async def test_missing_packages_are_told_by_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracesUnavailable, match=r"pip install 'rejoinder\[otel\]'"):
        tracing("http://127.0.0.1:4318")


async def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="otlp"):
        load_settings({"otlp_endpoint": "somewhere"})

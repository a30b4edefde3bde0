"""How long turns took, of one chat and of the whole server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar import Response, get
from litestar.enums import MediaType
from litestar.params import FromPath, FromQuery
from litestar.response import Stream

from app import pages
from app.faults import NoSuchPage
from app.latency_charts import Chart, turn_charts
from app.latency_download import as_csv, as_json
from app.latency_report import (
    RANGES,
    RangeName,
    Summary,
    read_report,
    server_charts,
    summary_of,
)
from app.routes.browser import html, user_id_of
from app.security.roles import require_operator
from app.services import HTTPRequest, Services, UseServices
from app.turn_rows import turn_views
from engine.errors import EngineUnavailable
from engine.messages import EngineStats
from sessions.latency_records import TurnRecord

STATS_WAIT_S = 2.0
TURNS_A_PAGE = 50
DOWNLOADED_AT_ONCE = 500


class _Page(msgspec.Struct, frozen=True):
    """Some of a chat's turns; page 1 has the latest ones."""

    number: int
    last: int
    total: int
    first: int  # number of the first turn on it, counted from 1
    turns: list[TurnRecord]


@get("/chats/{chat_id:str}/latency", include_in_schema=False)
async def chat_latency(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str], page: FromQuery[int] = 1
) -> Response[str]:
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    shown = await _page(services, chat_id, page)
    context = await pages.sidebar(services, chat.user_id, current=chat_id)
    context |= {
        "chat": chat,
        "page": shown,
        "charts": turn_charts(shown.turns, first=shown.first),
        "turns": turn_views(shown.turns, first=shown.first),
    }
    return html(services.views.page(request, "chat_latency.html", context))


@get("/chats/{chat_id:str}/latency.json", include_in_schema=False)
async def chat_latency_json(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str], page: FromQuery[int] = 1
) -> Response[bytes]:
    await pages.own_chat(services, await user_id_of(request), chat_id)
    shown = await _page(services, chat_id, page)
    charts = turn_charts(shown.turns, first=shown.first)
    return _json({"charts": charts, "first": shown.first, "turns": shown.turns})


@get(
    ["/chats/{chat_id:str}/latency/turns.csv", "/chats/{chat_id:str}/latency/turns.json"],
    include_in_schema=False,
)
async def chat_latency_download(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Stream:
    """All of a chat's turns, one by one."""
    await pages.own_chat(services, await user_id_of(request), chat_id)

    async def turns() -> AsyncGenerator[list[TurnRecord], None]:
        first = 0
        while page := await services.repository.chat_turns(
            chat_id, first=first, limit=DOWNLOADED_AT_ONCE
        ):
            yield page
            first += len(page)

    return _download(request, turns(), f"latency-of-chat-{chat_id}")


@get("/latency", include_in_schema=False)
async def server_latency(
    request: HTTPRequest, services: UseServices, span: FromQuery[str] = "day"
) -> Response[str]:
    """For operators: all chats, summed up."""
    await require_operator(request)
    name, summary, charts = await _report(services, span)
    context = await pages.sidebar(services, await user_id_of(request))
    context |= {
        "info": services.engine.info,
        "stats": await _stats(services),
        "ranges": RANGES,
        "chosen": name,
        "summary": summary,
        "charts": charts,
    }
    return html(services.views.page(request, "latency.html", context))


@get("/latency.json", include_in_schema=False)
async def server_latency_json(
    request: HTTPRequest, services: UseServices, span: FromQuery[str] = "day"
) -> Response[bytes]:
    await require_operator(request)
    name, summary, charts = await _report(services, span)
    return _json(
        {
            "span": name,
            "engine": services.engine.info,
            "stats": await _stats(services),
            "summary": summary,
            "charts": charts,
        }
    )


@get(["/latency/turns.csv", "/latency/turns.json"], include_in_schema=False)
async def server_latency_download(
    request: HTTPRequest, services: UseServices, span: FromQuery[str] = "day"
) -> Stream:
    """All chats' turns of a range, one by one, without what would tell whose they are."""
    await require_operator(request)
    name = _range(span)
    length = RANGES[name].length
    begun = 0.0 if length is None else datetime.now(UTC).timestamp() - length

    async def turns() -> AsyncGenerator[list[TurnRecord], None]:
        since, after = datetime.fromtimestamp(begun, UTC), None
        while page := await services.repository.turns_since(
            since, after=after, limit=DOWNLOADED_AT_ONCE
        ):
            yield page
            after = page[-1]

    return _download(request, turns(), f"latency-{name}")


async def _page(services: Services, chat_id: str, number: int) -> _Page:
    """Raises NoSuchPage."""
    total = await services.repository.number_of_turns(chat_id)
    last = max(1, -(-total // TURNS_A_PAGE))
    if not 1 <= number <= last:
        raise NoSuchPage
    end = total - (number - 1) * TURNS_A_PAGE
    first = max(0, end - TURNS_A_PAGE)
    turns = await services.repository.chat_turns(chat_id, first=first, limit=end - first)
    return _Page(number=number, last=last, total=total, first=first + 1, turns=turns)


async def _report(services: Services, span: str) -> tuple[RangeName, Summary, list[Chart]]:
    name = _range(span)
    report = await read_report(services.repository, name, datetime.now(UTC))
    per_token = services.engine.info.bytes_per_token_kv
    return name, summary_of(report, bytes_per_token=per_token), server_charts(report)


def _range(name: str) -> RangeName:
    """Raises NoSuchPage."""
    for known in RANGES:
        if known == name:
            return known
    raise NoSuchPage


def _download(request: HTTPRequest, turns: AsyncIterator[list[TurnRecord]], name: str) -> Stream:
    is_csv = request.url.path.endswith(".csv")
    form = "csv" if is_csv else "json"
    return Stream(
        as_csv(turns) if is_csv else as_json(turns),
        media_type="text/csv; charset=utf-8" if is_csv else MediaType.JSON,
        headers={"Content-Disposition": f'attachment; filename="{name}.{form}"'},
    )


async def _stats(services: Services) -> EngineStats | None:
    try:
        async with asyncio.timeout(STATS_WAIT_S):
            return await services.engine.stats()
    except (TimeoutError, EngineUnavailable):
        return None


def _json(value: Any) -> Response[bytes]:
    return Response(msgspec.json.encode(value), media_type=MediaType.JSON)


HANDLERS = [
    chat_latency,
    chat_latency_json,
    chat_latency_download,
    server_latency,
    server_latency_json,
    server_latency_download,
]

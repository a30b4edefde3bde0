"""How long turns took, of one chat and of the whole server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Response, get
from litestar.enums import MediaType
from litestar.params import FromPath

from app import pages
from app.latency_charts import Chart, percentile, server_charts, turn_charts
from app.routes.browser import html, user_id_of
from app.services import HTTPRequest, Services, UseServices
from engine.errors import EngineUnavailable
from engine.messages import EngineStats
from sessions.records import TurnLatency

STATS_WAIT_S = 2.0
RECENT = 2000  # turns that the server's page looks at
OWN_CHATS = 10_000


@get("/chats/{chat_id:str}/latency", include_in_schema=False)
async def chat_latency(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    turns = await services.repository.chat_latency(chat_id)
    context = await pages.sidebar(services, chat.user_id, current=chat_id)
    context |= {"chat": chat, "charts": turn_charts(turns), "turns": turns}
    return html(services.views.page(request, "chat_latency.html", context))


@get("/chats/{chat_id:str}/latency.json", include_in_schema=False)
async def chat_latency_json(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[bytes]:
    await pages.own_chat(services, await user_id_of(request), chat_id)
    turns = await services.repository.chat_latency(chat_id)
    return _json({"charts": turn_charts(turns), "turns": turns})


@get("/latency", include_in_schema=False)
async def server_latency(request: HTTPRequest, services: UseServices) -> Response[str]:
    user_id = await user_id_of(request)
    everyone, own = await _recent(services, user_id)
    context = await pages.sidebar(services, user_id)
    context |= {
        "info": services.engine.info,
        "stats": await _stats(services),
        "summary": _summary(everyone),
        "charts": server_charts(everyone),
        "own_charts": turn_charts(own),
        "turns": own,
    }
    return html(services.views.page(request, "latency.html", context))


@get("/latency.json", include_in_schema=False)
async def server_latency_json(request: HTTPRequest, services: UseServices) -> Response[bytes]:
    """All users' turns summed up, and this user's own one by one."""
    everyone, own = await _recent(services, await user_id_of(request))
    charts: list[Chart] = [*server_charts(everyone), *turn_charts(own)]
    return _json(
        {
            "engine": services.engine.info,
            "stats": await _stats(services),
            "summary": _summary(everyone),
            "charts": charts,
            "turns": own,
        }
    )


async def _recent(
    services: Services, user_id: str | None
) -> tuple[list[TurnLatency], list[TurnLatency]]:
    """The latest turns of everybody, and those of them that are this user's."""
    turns = await services.repository.recent_latency(limit=RECENT)
    if user_id is None:
        return turns, []
    chats = await services.repository.chats(user_id, limit=OWN_CHATS)
    own = {chat.id for chat in chats}
    return turns, [turn for turn in turns if turn.chat_id in own]


async def _stats(services: Services) -> EngineStats | None:
    try:
        return await asyncio.wait_for(services.engine.stats(), STATS_WAIT_S)
    except (TimeoutError, EngineUnavailable):
        return None


def _summary(turns: list[TurnLatency]) -> dict[str, Any]:
    """Medians and totals of the turns, by whether a chat's state had to come back."""
    returning = [one.latency for one in turns if one.latency.restored_tokens]
    other = [one.latency for one in turns if not one.latency.restored_tokens]
    return {
        "turns": len(turns),
        "restored_turns": len(returning),
        "restored_tokens": sum(one.restored_tokens for one in returning),
        "restored_bytes": sum(one.restore_bytes for one in returning),
        "first_token_p50_ms": percentile((one.server_ttft_ms for one in other), 50),
        "first_token_p95_ms": percentile((one.server_ttft_ms for one in other), 95),
        "returning_first_token_p50_ms": percentile((one.server_ttft_ms for one in returning), 50),
        "returning_first_token_p95_ms": percentile((one.server_ttft_ms for one in returning), 95),
    }


def _json(value: Any) -> Response[bytes]:
    return Response(msgspec.json.encode(value), media_type=MediaType.JSON)


HANDLERS = [chat_latency, chat_latency_json, server_latency, server_latency_json]

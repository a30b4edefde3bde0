"""For supervisors and monitors: the processes answer, the engine makes progress, the figures."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Response, get
from prometheus_client import CONTENT_TYPE_LATEST

from app.security import OPEN
from app.security.roles import require_operator
from app.services import HTTPRequest, Services, UseServices
from engine.errors import EngineUnavailable
from engine.messages import EngineStats

STATS_WAIT_S = 2.0
STUCK_MS = 10_000.0  # a step takes less by far, also with long prompts


@get("/healthz", include_in_schema=False, opt=OPEN)
async def alive() -> dict[str, str]:
    """The web process answers. For those who start it again when it does not."""
    return {"status": "ok"}


@get("/health", include_in_schema=False, opt=OPEN)
async def health(services: UseServices) -> Response[dict[str, Any]]:
    """The engine is there and its loop comes round; 503 with the reason otherwise."""
    reason, stats = await _progress(services)
    if stats is None:
        return _unwell(reason)
    return Response({"status": "ok", **_told(services, stats)})


@get("/readyz", include_in_schema=False, opt=OPEN)
async def ready(services: UseServices) -> Response[dict[str, Any]]:
    """The same, and new questions are taken. For those who send requests here or elsewhere."""
    if services.gate.draining:
        return _unwell("the server is about to end")
    reason, stats = await _progress(services)
    if stats is None:
        return _unwell(reason)
    return Response({"status": "ready", **_told(services, stats)})


@get("/metrics", include_in_schema=False, opt=OPEN)
async def metrics(request: HTTPRequest, services: UseServices) -> Response[bytes]:
    """For Prometheus: an operator's API key as the bearer token, or an operator's browser."""
    await require_operator(request)
    _, stats = await _progress(services)
    gate = services.gate
    text = services.metrics.text(
        services.engine.info,
        stats,
        running=gate.open_turns,
        draining=gate.draining,
        stores=not services.repository.trouble,
    )
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _progress(services: Services) -> tuple[str, EngineStats | None]:
    """What the engine says of itself, or why it makes no progress."""
    try:
        async with asyncio.timeout(STATS_WAIT_S):
            stats = await services.engine.stats()
    except TimeoutError:
        return "the engine does not answer", None
    except EngineUnavailable:
        return "the engine is being started again", None
    if stats.last_step_age_ms > STUCK_MS:
        return f"the engine's last step is {stats.last_step_age_ms / 1e3:.0f} s ago", None
    return "", stats


def _told(services: Services, stats: EngineStats) -> dict[str, Any]:
    return {
        "database_trouble": services.repository.trouble or None,
        "running": stats.running,
        "waiting": stats.waiting,
        "checkpoints_dropped": stats.stripes_dropped,
        "checkpoints_rejected": stats.stripes_rejected,
        "checkpoint_trouble": stats.write_trouble or None,
    }


def _unwell(reason: str) -> Response[dict[str, Any]]:
    return Response(
        {"status": "not ready", "reason": reason}, status_code=503, headers={"Retry-After": "5"}
    )


HANDLERS = [alive, health, ready, metrics]

"""For supervisors: the process answers; the engine makes progress."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Response, get

from app.security import OPEN
from app.services import UseServices
from engine.errors import EngineUnavailable

STATS_WAIT_S = 2.0
STUCK_MS = 10_000.0  # a step takes less by far, also with long prompts


@get("/health", include_in_schema=False, opt=OPEN)
async def health() -> dict[str, str]:
    """The web process answers."""
    return {"status": "ok"}


@get("/readyz", include_in_schema=False, opt=OPEN)
async def ready(services: UseServices) -> Response[dict[str, Any]]:
    """The engine is there and its loop comes round; 503 with the reason otherwise."""
    try:
        stats = await asyncio.wait_for(services.engine.stats(), STATS_WAIT_S)
    except TimeoutError:
        return _not_ready("the engine does not answer")
    except EngineUnavailable:
        return _not_ready("the engine is being started again")
    if stats.last_step_age_ms > STUCK_MS:
        return _not_ready(f"the engine's last step is {stats.last_step_age_ms / 1e3:.0f} s ago")
    return Response({"status": "ready", "running": stats.running, "waiting": stats.waiting})


def _not_ready(reason: str) -> Response[dict[str, Any]]:
    return Response(
        {"status": "not ready", "reason": reason}, status_code=503, headers={"Retry-After": "5"}
    )


HANDLERS = [health, ready]

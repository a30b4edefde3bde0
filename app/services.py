"""What the handlers work with, put together once by `app.main`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

from litestar import Request
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.types import ASGIApp, Receive, Scope, Send

from app.accounts.service import Accounts
from app.api.service import Api
from app.assistants.service import AssistantService
from app.chat import ChatService
from app.engine_gate import EngineGate
from app.finished_answers import FinishedAnswers
from app.history.importer import Importer
from app.metrics import Metrics
from app.operating.checks import Checks
from app.settings import Settings
from app.streams import TurnHub
from app.submissions import Submissions
from app.upkeep import Upkeep
from app.views import Views
from engine.client import Engine
from sessions.repository import Repository

HTTPRequest = Request[Any, Any, State]
_RECEIVED = "rejoinder_received_at"


@dataclass(frozen=True)
class Services:
    """The parts of a running server."""

    settings: Settings
    repository: Repository
    engine: Engine
    gate: EngineGate  # the same engine
    metrics: Metrics
    hub: TurnHub
    upkeep: Upkeep
    chat: ChatService
    views: Views
    finished: FinishedAnswers
    accounts: Accounts
    submissions: Submissions
    importer: Importer
    api: Api
    assistants: AssistantService
    checks: Checks


UseServices = NamedDependency[Services]


def provide_services(state: State) -> Services:
    return cast(Services, state.services)


def stamp_receipt(app: ASGIApp) -> ASGIApp:
    """Middleware: note when a request came in, for its turn's time to the first token."""

    async def stamped(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[_RECEIVED] = time.monotonic()
        await app(scope, receive, send)

    return stamped


def received_at(request: HTTPRequest) -> float:
    """When the request came in, in seconds of the monotonic clock."""
    return cast(float, request.scope["state"][_RECEIVED])


def chats_shown(request: HTTPRequest) -> int:
    """How many chats the page lists that a script asks for; 0 when it does not say."""
    value = request.headers.get("x-chats-shown", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 7 else 0


def is_fragment(request: HTTPRequest) -> bool:
    """htmx asks for a part of a page; with the type "full" it wants all of it."""
    headers = request.headers
    return headers.get("hx-request") == "true" and headers.get("hx-request-type") != "full"

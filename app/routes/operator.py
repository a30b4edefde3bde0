"""The operator's page: who uses how much, what the engine does, and what can be done about it."""

from __future__ import annotations

from litestar import Response, get, post
from litestar.params import FromQuery

from app import pages
from app.operating.checks import collect
from app.operating.report import operator_report, owners_gone
from app.routes.browser import form_field, go_to, html, user_id_of
from app.security import csrf_token, require_operator
from app.services import HTTPRequest, UseServices, is_fragment
from app.settings import MIB

MAX_FREED = 1 << 50


@get("/operator", include_in_schema=False)
async def operator(
    request: HTTPRequest, services: UseServices, freed: FromQuery[str] = ""
) -> Response[str]:
    await require_operator(request)
    settings = services.settings
    context = await pages.sidebar(services, await user_id_of(request))
    context |= {
        "report": await operator_report(settings, services.repository, services.engine),
        "settings": settings,
        "cap_bytes": settings.checkpoint_cap_mib * MIB,
        "check": services.checks.last,
        "freed": _freed(freed),
    }
    return html(services.views.page(request, "operator.html", context))


@post("/operator/collect", include_in_schema=False)
async def collect_stale(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Drop what nobody can use: checkpoints of other weights, and of chats that are gone."""
    await require_operator(request)
    gone = await owners_gone(services.settings, services.repository)
    freed = await collect(services.engine, gone)
    return go_to(request, f"/operator?freed={'' if freed is None else freed}#storage")


@post("/operator/check", include_in_schema=False)
async def begin_check(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Check database and checkpoints in the background; with `repair` drop what was damaged."""
    await require_operator(request)
    if await form_field(request, "repair"):
        await services.checks.repair()
    else:
        services.checks.begin()
    if is_fragment(request):
        return html(_check_fragment(request, services))
    return go_to(request, "/operator#check")


@get("/operator/check", include_in_schema=False)
async def check(request: HTTPRequest, services: UseServices) -> Response[str]:
    """How far the check is, or what it found."""
    await require_operator(request)
    if not is_fragment(request):
        return go_to(request, "/operator#check")
    return html(_check_fragment(request, services))


def _check_fragment(request: HTTPRequest, services: UseServices) -> str:
    return services.views.fragment(
        "operator_check.html", csrf_token=csrf_token(request), check=services.checks.last
    )


def _freed(given: str) -> int | None:
    """Bytes, as the address says after a collection."""
    if given.isascii() and given.isdigit() and len(given) < 16:
        return min(int(given), MAX_FREED)
    return None


HANDLERS = [operator, collect_stale, begin_check, check]

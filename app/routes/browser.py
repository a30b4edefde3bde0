"""What routes for browsers share: forms, pages, fragments, and redirects with or without htmx."""

from __future__ import annotations

from hashlib import blake2b

from litestar import Response
from litestar.enums import MediaType

from app.chat import MAX_ANSWERS
from app.faults import InvalidField
from app.security import current_user
from app.services import HTTPRequest, is_fragment
from app.views import Problem

VARY = {"Vary": "HX-Request, HX-Request-Type"}


def html(body: str, *, problem: Problem | None = None) -> Response[str]:
    """A page or fragment; one that tells of a problem has its status."""
    headers = dict(VARY)
    if problem is not None and problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    status = 200 if problem is None else problem.status
    return Response(body, status_code=status, media_type=MediaType.HTML, headers=headers)


def go_to(request: HTTPRequest, path: str) -> Response[str]:
    """Send the browser on: a 303, or its htmx form for a request made by htmx."""
    fragment = is_fragment(request)
    headers = {**VARY, "HX-Redirect" if fragment else "Location": path}
    return Response(
        "", status_code=200 if fragment else 303, media_type=MediaType.HTML, headers=headers
    )


def versioned_html(request: HTTPRequest, body: str) -> Response[str]:
    """A page with its ETag, for scripts that look again; 304 without it when nothing changed."""
    etag = f'"{blake2b(body.encode(), digest_size=16).hexdigest()}"'
    headers = {**VARY, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response("", status_code=304, media_type=MediaType.HTML, headers=headers)
    return Response(body, media_type=MediaType.HTML, headers=headers)


async def form_field(request: HTTPRequest, name: str) -> str:
    """A field of the posted form, "" when it is missing; the last one when it is repeated."""
    values = (await request.form()).getall(name, [])
    value = values[-1] if values else ""
    return value if isinstance(value, str) else ""


async def number_of_answers(request: HTTPRequest) -> int:
    """How many answers the form asks for; 1 when it does not say. Raises InvalidField."""
    value = await form_field(request, "answers") or "1"
    if value not in [str(number) for number in range(1, MAX_ANSWERS + 1)]:
        raise InvalidField(
            "answers",
            f"{value[:20]!r} is no number of answers; 1 to {MAX_ANSWERS} can be asked for at once.",
        )
    return int(value)


async def user_id_of(request: HTTPRequest) -> str | None:
    """The user whom the browser's login names; None for a browser not known yet."""
    user = await current_user(request)
    return user.id if user else None

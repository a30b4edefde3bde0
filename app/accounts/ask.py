"""What a browser gets that would need an account, by what it can do with the answer."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode, urlsplit

from litestar import Response
from litestar.enums import MediaType

from app.accounts.names import local_path
from app.services import HTTPRequest, is_fragment
from app.views import Problem, Views

_VARY = {"Vary": "HX-Request, HX-Request-Type"}


def sign_in_path(next_path: str) -> str:
    """The way to the sign-in form, and from there on."""
    return "/sign-in" if next_path == "/" else "/sign-in?" + urlencode({"next_path": next_path})


def ask_to_sign_in(request: HTTPRequest, views: Views) -> Response[Any]:
    """A redirect where a page would be shown; else 401, which no stream connects to again.

    What was written in a form that htmx sends stays where it is.
    """
    headers = request.headers
    if request.method != "GET" and headers.get("hx-request") == "true":
        problem = Problem(status=401, text="You are not signed in any more.")
        return Response(
            views.fragment("signed_out.html", problem=problem),
            status_code=401,
            media_type=MediaType.HTML,
            headers={**_VARY, "HX-Retarget": "#notice", "HX-Reswap": "innerHTML"},
        )
    if "text/event-stream" in headers.get("accept", ""):
        return _refused(request, views)
    if is_fragment(request):
        shown = urlsplit(headers.get("hx-current-url", ""))
        path = local_path(shown.path + (f"?{shown.query}" if shown.query else ""))
        return _refused(request, views, {"HX-Redirect": sign_in_path(path)})
    if headers.get("sec-fetch-mode", "navigate") != "navigate" or _wants_json(request):
        return _refused(request, views)
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    next_path = local_path(path) if request.method == "GET" else "/"
    return Response(
        "",
        status_code=303,
        media_type=MediaType.HTML,
        headers={**_VARY, "Location": sign_in_path(next_path)},
    )


def _refused(
    request: HTTPRequest, views: Views, more: dict[str, str] | None = None
) -> Response[Any]:
    problem = Problem(status=401, text="You are not signed in.")
    headers = {**_VARY, **(more or {})}
    if _wants_json(request):
        return Response(
            views.problem_json(problem),
            status_code=401,
            media_type=MediaType.JSON,
            headers=headers,
        )
    return Response(problem.text, status_code=401, media_type=MediaType.TEXT, headers=headers)


def _wants_json(request: HTTPRequest) -> bool:
    return request.url.path.endswith(".json")

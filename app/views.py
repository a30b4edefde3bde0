"""Records turned into what the templates show, and the templates turned into HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Request
from markupsafe import Markup

from app.assets import AssetUrls
from app.conversation_views import AnswerView, note_of
from app.live_turn import LiveTurn
from app.rendering import render_markdown
from app.security import csrf_token, known_user
from app.timeline import last_line
from app.turn_records import RETRYABLE, can_go_on
from sessions.records import Latency, Message

TEMPLATES = Path(__file__).parent.parent / "templates"
TITLES = {  # of a page that shows nothing but a problem
    400: "This did not work",
    401: "Not signed in",
    403: "Refused",
    404: "Not found",
    405: "This did not work",
    409: "The chat has changed",
    413: "Too long",
    415: "This did not work",
    429: "The server is busy",
    500: "A fault of the server",
    503: "Not ready yet",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What went wrong, in words for the person in front of the page."""

    status: int
    text: str
    hint: str = ""
    link: str = ""
    link_text: str = ""
    carry_from: str = ""  # a chat that a new one can go on from
    field: str = ""
    retry_after_s: int | None = None

    @property
    def title(self) -> str:
        return TITLES.get(self.status) or HTTPStatus(self.status).phrase


class Views:
    """Owns the template environment. Event loop only."""

    def __init__(self, assets: AssetUrls) -> None:
        self._env = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            trim_blocks=True,
            auto_reload=False,  # or each inclusion looks at its file, 600 times for a long chat
            undefined=StrictUndefined,
        )
        self._env.filters["count"] = lambda number: f"{number:,}"
        self._env.filters["figure"] = _figure
        self._env.filters["sentence"] = _sentence
        self._env.globals["static"] = assets.url

    def answer(
        self,
        message: Message,
        *,
        html: str = "",
        live: LiveTurn | None = None,
        latencies: Sequence[Latency] = (),
        last: bool = False,
        **more: Any,
    ) -> AnswerView:
        """An answer as `message` has it with its `html`, or as its running turn `live` does.

        `last` says that nothing follows it. A turn that has ended since `live` was looked up is
        shown as running: its stream then says how it ended.
        """
        if live is not None:
            return AnswerView(
                id=message.id,
                chat_id=message.chat_id,
                status="running",
                running=True,
                turn_id=live.turn_id,
                html=Markup(render_markdown(live.text)),
                phase=live.phase,
                done=live.done,
                total=live.total,
                **more,
            )
        # Running in the database only: its end could not be stored.
        if message.status == "running":
            message = replace(message, status="interrupted")
        return AnswerView(
            id=message.id,
            chat_id=message.chat_id,
            status=message.status,
            running=False,
            html=Markup(html),
            note=note_of(message),
            line=last_line(latencies),
            retryable=last and message.status in RETRYABLE,
            continuable=last and can_go_on(message),
            **more,
        )

    def frame(self, turn: LiveTurn, *, first_block: int, whole: bool) -> str:
        """One event of a running turn's stream."""
        blocks = Markup("").join(Markup(html) for html in turn.closed_blocks[first_block:])
        return self.fragment(
            "frame.html",
            answer=turn,
            message_id=turn.message_id,
            whole=whole,
            blocks=blocks,
            open_block=Markup(turn.open_block),
            announced="" if whole else blocks.striptags(),
        )

    def fragment(self, name: str, **context: Any) -> str:
        return self._env.get_template(f"fragments/{name}").render(context)

    def page(self, request: Request[Any, Any, Any], name: str, context: Mapping[str, Any]) -> str:
        """A whole page. Call it before the response starts: it may set the CSRF cookie."""
        common: dict[str, Any] = {
            "csrf_token": csrf_token(request),
            "account": (account := known_user(request.scope)),
            "signed_out": (required := request.app.state.accounts_required) and account is None,
            "shows_latency": not required or (account is not None and account.is_operator),
            "chats": None,
            "current_chat_id": None,
            "older_after": "",
            "first_page": True,
            "deleted": [],
            "problem": None,
            "text": "",
            "autofocus": False,
        }
        return self._env.get_template(f"pages/{name}").render({**common, **context})

    def problem_page(self, request: Request[Any, Any, Any], problem: Problem) -> str:
        return self.page(request, "problem.html", {"problem": problem})

    def problem_json(self, problem: Problem) -> str:
        return msgspec.json.encode({"status": problem.status, "error": problem.text}).decode()


def _figure(value: float | None, unit: str = "") -> str:
    """A measurement for people: unknown is a dash without a unit, never 0."""
    if value is None:
        return "\N{EN DASH}"
    number = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
    return f"{number} {unit}" if unit else number


def _sentence(text: str) -> str:
    """A reason as a sentence of its own; "" stays empty."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text else ""

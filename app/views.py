"""Records turned into what the templates show, and the templates turned into HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Request
from markupsafe import Markup

from app.assets import AssetUrls
from app.rendering import FinishedHtml, render_markdown
from app.security import csrf_token
from app.streams import LiveTurn
from sessions.records import Chat, Latency, Message

TEMPLATES = Path(__file__).parent.parent / "templates"
NOTES = {
    "stopped": "You stopped this answer.",
    "interrupted": "This answer was interrupted.",
    "failed": "This answer failed.",
}
RETRYABLE = frozenset(NOTES)
TITLES = {  # of a page that shows nothing but a problem
    400: "This did not work",
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
    field: str = ""
    retry_after_s: int | None = None

    @property
    def title(self) -> str:
        return TITLES.get(self.status) or HTTPStatus(self.status).phrase


@dataclass(frozen=True, kw_only=True)
class AnswerView:
    """One answer as `fragments/answer.html` shows it."""

    id: str
    chat_id: str
    status: str
    running: bool
    html: Markup
    turn_id: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    note: str = ""
    latency_line: str = ""
    retryable: bool = False
    role: str = "assistant"


@dataclass(frozen=True, kw_only=True)
class ComposerView:
    """The parts of the composer that change with the chat: what comes next, and the gauge."""

    parent_id: str
    used: int  # tokens of the context
    limit: int
    running: bool


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"


def latency_line(latency: Latency | None) -> str:
    """Where the prompt's tokens came from and how soon the first token came, in one line."""
    if latency is None:
        return ""
    if latency.server_ttft_ms is None and not latency.prefill_ms:
        return ""  # stopped in the queue: its prompt was never read
    parts = []
    if latency.restored_tokens:
        parts.append(f"restored {_tokens(latency.restored_tokens)} in {latency.restore_ms:,.0f} ms")
    if latency.recomputed_tokens:
        parts.append(f"recomputed {_tokens(latency.recomputed_tokens)}")
    if latency.resident_tokens:
        parts.append(f"{_tokens(latency.resident_tokens)} still in memory")
    own = latency.prefix_computed_tokens + latency.prefix_restored_tokens
    if latency.prefix_restored_tokens:
        parts.append(f"restored the assistant's {_tokens(latency.prefix_restored_tokens)}")
    if latency.prefix_computed_tokens:
        parts.append(f"read the assistant's {_tokens(latency.prefix_computed_tokens)}")
    if latency.prefix_tokens > own:
        parts.append(f"{_tokens(latency.prefix_tokens - own)} shared with other chats")
    first_token_ms = latency.server_ttft_ms
    if first_token_ms is not None:
        parts.append(f"first token {first_token_ms:,.0f} ms")
    return ", ".join(parts)


class Views:
    """Owns the template environment and the cache of rendered answers. Event loop only."""

    def __init__(self, assets: AssetUrls) -> None:
        self._env = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            trim_blocks=True,
            undefined=StrictUndefined,
        )
        self._env.filters["count"] = lambda number: f"{number:,}"
        self._env.filters["figure"] = _figure
        self._env.filters["sentence"] = _sentence
        self._env.globals["static"] = assets.url
        self._finished = FinishedHtml()

    def answer(
        self,
        message: Message,
        *,
        live: LiveTurn | None = None,
        latency: Latency | None = None,
        last: bool = False,
    ) -> AnswerView:
        """An answer as `message` has it, or as its running turn `live` does.

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
            )
        # Running in the database only: its end could not be stored.
        status = "interrupted" if message.status == "running" else message.status
        note = NOTES.get(status, "")
        if message.error:
            note = message.error
        elif message.finish_reason == "length":
            note = "The answer reached the length limit."
        return AnswerView(
            id=message.id,
            chat_id=message.chat_id,
            status=status,
            running=False,
            html=Markup(self._finished.html(message.text)),
            note=note,
            latency_line=latency_line(latency),
            retryable=last and status in RETRYABLE,
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
        common = {
            "csrf_token": csrf_token(request),
            "chats": None,
            "current_chat_id": None,
            "older_before": "",
            "problem": None,
            "text": "",
            "autofocus": False,
        }
        return self._env.get_template(f"pages/{name}").render({**common, **context})

    def problem_page(self, request: Request[Any, Any, Any], problem: Problem) -> str:
        return self.page(request, "problem.html", {"problem": problem})

    def problem_json(self, problem: Problem) -> str:
        return msgspec.json.encode({"status": problem.status, "error": problem.text}).decode()


def composer_view(
    chat: Chat, path: list[Message], *, prefix_tokens: int, limit: int, running: bool
) -> ComposerView:
    """The composer after the messages of `path`."""
    return ComposerView(
        parent_id=path[-1].id if path else "",
        used=prefix_tokens + sum(len(message.token_ids) for message in path),
        limit=limit,
        running=running,
    )


def _figure(value: float | None, unit: str = "") -> str:
    """A measurement for people: unknown is a dash without a unit, never 0."""
    if value is None:
        return "\N{EN DASH}"
    number = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
    return f"{number} {unit}" if unit else number


def _sentence(text: str) -> str:
    """A reason as a sentence of its own; "" stays empty."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text else ""

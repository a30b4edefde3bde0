"""A model's chat template, taken apart into the pieces that stand between texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError

Message = tuple[str, str]  # role, content

# Plain words, so that a template that trims or searches texts leaves them alone.
_SYSTEM = "xQ0systemQx"
_USERS = ("xQ1userQx", "xQ2userQx", "xQ3userQx")
_ANSWERS = ("xQ1answerQx", "xQ2answerQx")


@dataclass(frozen=True)
class Pieces:
    """What the template writes around texts.

    A chat is `system_open TEXT system_close` (or `no_system`), then per turn
    `user_open TEXT user_close ANSWER`, where later turns open with `next_user_open`, which also
    ends the answer before it.
    """

    system_open: str
    system_close: str
    no_system: str
    user_open: str
    next_user_open: str
    user_close: str


class _Generation(Extension):
    """`{% generation %}` only marks a block for trainers: its body is rendered as it is."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 declares a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders chats as transformers does, in Jinja's sandbox. Stateless after construction."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: name ("bos_token") to text. Raises ModelError on a syntax error."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        now = datetime.now().astimezone()  # one date for all pieces
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = now.strftime
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The chat's text, by default ready for the next answer. Raises jinja2.TemplateError."""
        records = [{"role": role, "content": content} for role, content in messages]
        return self.render_records(records, generation_prompt=generation_prompt)

    def render_records(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """The same of messages with all their fields, and with tools. Raises TemplateError."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def pieces(self) -> Pieces:
        """Take the template apart.

        A template that refuses system messages, or moves them as the chat grows, gets the system
        prompt at the head of the first user message. Raises ModelError when a chat is not the sum
        of its messages (history rewritten, texts altered).
        """
        try:
            no_system, next_user_open, user_close = self._take_apart(None)
        except TemplateError as error:
            raise ModelError(f"the model's chat template fails: {error}") from error
        try:
            head, *rest = self._take_apart(_SYSTEM)
            if rest != [next_user_open, user_close]:
                raise ModelError("a system prompt changes the turns after it")
        except (TemplateError, ModelError):
            return Pieces(no_system, "\n\n", no_system, "", next_user_open, user_close)
        system_open, close = head.split(_SYSTEM)
        user_open = self._user_open(system_open, close)
        if not no_system.endswith(user_open):
            user_open = ""
        return Pieces(
            system_open=system_open,
            system_close=close.removesuffix(user_open),
            no_system=no_system.removesuffix(user_open),
            user_open=user_open,
            next_user_open=next_user_open,
            user_close=user_close,
        )

    def _take_apart(self, system: str | None) -> tuple[str, str, str]:
        """(up to the first user's text, between answer and user's text, after a user's text)."""
        start: list[Message] = [] if system is None else [("system", system)]
        user_1, user_2, user_3 = (("user", text) for text in _USERS)
        answer_1, answer_2 = (("assistant", text) for text in _ANSWERS)
        head, user_close = _gaps(self.render([*start, user_1]), _USERS[:1])
        turns = [user_1, answer_1, user_2, answer_2, user_3]
        texts = [content for _, content in turns]
        same_head, after_1, open_2, after_2, open_3, last = _gaps(
            self.render([*start, *turns]), texts
        )
        # Some templates write the space that the model itself begins its answer with.
        spaced = after_1.startswith(user_close) and not after_1[len(user_close) :].strip()
        sums_up = (same_head, open_2, after_1, last) == (head, open_3, after_2, user_close)
        if not (sums_up and spaced):
            raise ModelError(
                "the model's chat template rewrites earlier messages as the chat grows; "
                "such templates are not supported"
            )
        if system is not None and head.count(system) != 1:
            raise ModelError("the model's chat template does not write the system prompt once")
        return head, open_2, user_close

    def _user_open(self, system_open: str, close: str) -> str:
        """The part of `close` (between system prompt and user's text) that belongs to the user."""
        trailing_spaces = close[len(close.rstrip(" ")) :]
        try:
            alone = self.render([("system", _SYSTEM)], generation_prompt=False)
        except TemplateError:
            return trailing_spaces
        system_part = alone.removeprefix(system_open + _SYSTEM)
        if system_part == alone or not close.startswith(system_part):
            return trailing_spaces
        return close[len(system_part) :]


def _gaps(rendered: str, texts: Sequence[str]) -> list[str]:
    """What stands before, between and after the texts, each of which occurs once, in order."""
    gaps: list[str] = []
    for text in texts:
        if rendered.count(text) != 1:
            raise ModelError(
                f"the model's chat template does not write each message once ({text!r})"
            )
        gap, rendered = rendered.split(text)
        gaps.append(gap)
    return [*gaps, rendered]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would alter prompts."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

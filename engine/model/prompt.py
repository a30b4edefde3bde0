"""Whole prompts of messages in any order: the template writes around texts, never inside them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from engine.model.tokenizer import ChatTokenizer

TOOL_CALL_OPEN = "<tool_call>"  # the way of writing calls that is understood (Hermes, Qwen)
_SENTINEL = re.compile(r"xQ(\d+)textQx")
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class PromptMessage:
    """One message; `extra` holds what a template may want of it besides role and text."""

    role: str
    text: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptIds:
    """A prompt up to where the answer begins; `prefix` ends with the first system message."""

    prefix: list[int]
    rest: list[int]


class PromptBuilder:
    """Builds prompts with a model's own template. Immutable; any thread may call it.

    The ids of alternating messages of users and answers are those of `ChatTokenizer.prefix_ids`,
    `user_ids` and `encode_text`, one after the other.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = tokenizer.pieces
        # Templates without system messages get the system prompt at the head of the first one.
        self._merges_system = pieces.system_open == pieces.no_system
        self.takes_tools = self._writes_tools()

    def build(
        self, messages: Sequence[PromptMessage], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> PromptIds:
        """The ids of a whole chat.

        Raises ValueError when the model's template cannot write these messages.
        """
        system = bool(messages) and messages[0].role in _SYSTEM_ROLES
        if system and self._merges_system:
            return self._build_merged(messages, tools)
        gaps, texts = self._render(messages, tools)
        first = 1 if system else 0
        opening = gaps[first]
        pieces = self._tokenizer.pieces
        head = pieces.system_close if system else pieces.no_system
        cut = len(opening)
        if pieces.user_open and opening.endswith(pieces.user_open):
            cut -= len(pieces.user_open)  # before it may stand tools
        elif opening.startswith(head):
            cut = len(head)
        if system:
            prefix = self._around(gaps[0], texts[0], opening[:cut], at_start=True)
        else:
            prefix = self._tokenizer.encode_piece(opening[:cut], at_start=True)
        prefix = self._tokenizer.with_one_bos(prefix)
        return PromptIds(prefix, self._rest(opening[cut:], gaps[first + 1 :], texts[first:]))

    def follow(self, messages: Sequence[PromptMessage]) -> list[int]:
        """The ids that follow an answer: its end, these messages, up to the next answer.

        Raises ValueError when the model's template cannot write these messages.
        """
        before = [PromptMessage("user", "-"), PromptMessage("assistant", "-")]
        gaps, texts = self._render([*before, *messages], None)
        return self._rest(gaps[2], gaps[3:], texts[2:])

    def _build_merged(
        self, messages: Sequence[PromptMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> PromptIds:
        system, *others = messages
        if not others or others[0].role != "user":
            raise ValueError("with this model a user's message must follow the system message")
        gaps, texts = self._render(others, tools)
        prefix = self._tokenizer.prefix_ids(system.text or "")
        return PromptIds(prefix, self._rest("", gaps[1:], texts))

    def _rest(self, opening: str, gaps: Sequence[str], texts: Sequence[str]) -> list[int]:
        """Ids of opening, text, gap, text, gap and so on."""
        ids: list[int] = []
        for text, gap in zip(texts, gaps, strict=True):
            ids += self._opened(opening, text, at_start=False)
            opening = gap
        return ids + self._tokenizer.encode_piece(opening, at_start=False)

    def _around(self, opening: str, text: str, closing: str, *, at_start: bool) -> list[int]:
        return [
            *self._opened(opening, text, at_start=at_start),
            *self._tokenizer.encode_piece(closing, at_start=False),
        ]

    def _opened(self, opening: str, text: str, *, at_start: bool) -> list[int]:
        """Ids of a piece and the text after it, whose first word gets the piece's last spaces."""
        head = opening.rstrip(" ")
        return [
            *self._tokenizer.encode_piece(head, at_start=at_start),
            *self._tokenizer.encode_text(opening[len(head) :] + text),
        ]

    def _render(
        self, messages: Sequence[PromptMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[str], list[str]]:
        """What the template writes before, between and after the texts, and the texts."""
        texts = [message.text for message in messages if message.text is not None]
        for value in _strings([*(tools or ()), *(message.extra for message in messages)]):
            if self._tokenizer.spells_control_token(value):
                raise ValueError(f"{value[:40]!r} holds one of the model's control tokens")
        number = 0
        records: list[dict[str, Any]] = []
        for message in messages:
            role = "system" if message.role == "developer" else message.role
            content = ""
            if message.text is not None:
                content = f"xQ{number}textQx"
                number += 1
            records.append({"role": role, "content": content, **message.extra})
        try:
            written = self._tokenizer.template.render_records(records, tools=tools)
        except TemplateError as error:
            raise ValueError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        parts = _SENTINEL.split(written)
        if [int(found) for found in parts[1::2]] != list(range(len(texts))):
            raise ValueError("the model's chat template does not write these messages in order")
        return parts[::2], texts

    def _writes_tools(self) -> bool:
        """Whether the template shows tools to the model and has it call them as we understand."""
        if TOOL_CALL_OPEN not in self._tokenizer.template_source:
            return False
        tool = {"type": "function", "function": {"name": "xQtoolQx", "parameters": {}}}
        ask = [{"role": "user", "content": "-"}]
        try:
            return "xQtoolQx" in self._tokenizer.template.render_records(ask, tools=[tool])
        except TemplateError:
            return False


def _strings(value: Any) -> Iterator[str]:
    """All texts inside of nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)

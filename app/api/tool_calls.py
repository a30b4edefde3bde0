"""Calls of tools in what a model wrote: JSON with name and arguments, inside `<tool_call>`."""

from __future__ import annotations

import json
import secrets
from typing import Any

import msgspec

from app.api.messages import CalledFunction, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class ToolCallReader:
    """Takes an answer's text as it comes; what is no call can be shown at once.

    A call that is not well-formed stays text. Owned by one answer.
    """

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to be no call."""
        self._held += text
        shown = ""
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                keep = self._beginning()
                cut = len(self._held) - keep
                shown += self._held[:cut]
                self._held = self._held[cut:]
                break
            shown += self._held[:start]
            self._held = self._held[start:]
            end = self._held.find(_CLOSE)
            if end < 0:
                break
            whole = self._held[: end + len(_CLOSE)]
            self._held = self._held[len(whole) :]
            call = _parse(whole[len(_OPEN) : end])
            if call is None:
                shown += whole
            else:
                self.calls.append(call)
        # Templates set calls apart by blank lines, which are no content.
        return "" if self.calls and not shown.strip() else shown

    def flush(self) -> str:
        """What is left at the answer's end: a call that was never closed may still be whole."""
        held, self._held = self._held, ""
        if held.startswith(_OPEN) and (call := _parse(held[len(_OPEN) :])) is not None:
            self.calls.append(call)
            return ""
        return held

    def _beginning(self) -> int:
        """Length of the longest end of the text that may begin a call."""
        for length in range(min(len(_OPEN) - 1, len(self._held)), 0, -1):
            if _OPEN.startswith(self._held[-length:]):
                return length
        return 0


def _parse(text: str) -> ToolCall | None:
    try:
        call = msgspec.json.decode(text.strip().encode(), type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = CalledFunction(name=call.name, arguments=arguments)
    return ToolCall(id=f"call_{secrets.token_hex(12)}", function=function)

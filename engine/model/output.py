"""The text of an answer as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.stop_strings import StopMatcher
from engine.model.tokenizer import ChatTokenizer


class OutputText:
    """Owns what is held back of one answer: incomplete UTF-8 and possible stop strings."""

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.incremental()
        self._matcher = StopMatcher(stop) if stop else None

    def push(self, token_id: int) -> tuple[str, bool]:
        """Text that became certain, and whether a stop string was completed (and cut off)."""
        text = self._decoder.push(token_id)
        return (text, False) if self._matcher is None else self._matcher.push(text)

    def flush(self) -> str:
        """What is still held back, at the end of an answer that no stop string ended."""
        text = self._decoder.flush()
        if self._matcher is None:
            return text
        safe, stopped = self._matcher.push(text)
        return safe if stopped else safe + self._matcher.flush()

"""Errors that the engine reports to its callers."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors of this package."""


class ModelError(EngineError):
    """A model is missing, damaged or of an unsupported family."""


class QueueFull(EngineError):
    """The bounded queue has no room; try again after `retry_after_s` seconds."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(f"the queue is full: {limit} requests are waiting or running")
        self.limit = limit
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """The engine process is not running, or died while it worked on the request."""


class ContextOverflow(EngineError):
    """The prompt leaves no room for an answer in the model's context."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"the chat has {num_tokens} tokens; the context holds {limit}")
        self.num_tokens = num_tokens
        self.limit = limit

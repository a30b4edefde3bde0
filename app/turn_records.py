"""What a turn is told of the past, and what is stored of its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.messages import Done, Failed
from sessions.records import EndStatus, Latency, Message

TOO_BUSY = "The server was too busy to take this question."
CUT_OFF = "The answer was cut off when the server stopped."
RETRYABLE = frozenset({"interrupted", "failed", "stopped"})


class PathMessage(Protocol):
    """What of a message tells how much of its path has had K/V."""

    @property
    def role(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


def history_of(path: Sequence[PathMessage]) -> tuple[list[int], int]:
    """The token ids of a path that ends in an answer, and how many leading ones have had K/V.

    Of the last answer that was made in this chat, the last sampled token was run through the
    model only if the model itself ended it; if none was sampled, maybe not even its question was.
    What was carried over or imported, and follows it, has never been run.
    """
    ids = [token for message in path for token in message.token_ids]
    made = [number for number, message in enumerate(path) if was_made_here(message)]
    if not made:
        return ids, 0
    number = made[-1]
    count = sum(len(message.token_ids) for message in path[: number + 1])
    answer = path[number]
    if answer.finish_reason != "eos":
        count -= 1 if answer.token_ids else len(path[number - 1].token_ids)
    return ids, count


def was_made_here(message: PathMessage) -> bool:
    ended_otherwise = message.status != "complete" or message.finish_reason is not None
    return message.role == "assistant" and ended_otherwise


def can_go_on(message: Message) -> bool:
    """Whether the model can go on with an answer: it has tokens, and no end of its own."""
    if message.role != "assistant" or not message.token_ids:
        return False
    return message.status in RETRYABLE or message.finish_reason == "length"


@dataclass(frozen=True)
class Outcome:
    """How a turn ended; `latency` is None where the engine measured nothing."""

    status: EndStatus
    finish_reason: str | None = None
    error: str | None = None
    latency: Latency | None = None


def outcome_of(end: Done | Failed | None, server_ttft_ms: float | None) -> Outcome:
    """From the engine's last word, None if the server's end came first."""
    match end:
        case None:
            return Outcome("interrupted", error=CUT_OFF)
        case Failed(kind="engine_died", reason=reason):
            return Outcome("interrupted", error=reason)
        case Failed(kind="queue_full"):
            return Outcome("failed", error=TOO_BUSY)
        case Failed(kind="context_overflow", reason=reason):
            return Outcome("failed", error=f"The model cannot take this chat: {reason}.")
        case Failed(reason=reason):
            return Outcome("failed", error=reason)
        case Done(finish=finish, stats=stats):
            latency = Latency(**msgspec.structs.asdict(stats), server_ttft_ms=server_ttft_ms)
            return Outcome(
                "stopped" if finish == "cancelled" else "complete", finish, None, latency
            )

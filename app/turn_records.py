"""What a turn is told of the past, and what is stored of its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.messages import Done, EngineInfo, Failed
from sessions.records import EndStatus, Latency, Message

TOO_BUSY = "The server was too busy to take this question."
CUT_OFF = "The answer was cut off when the server stopped."


def history_of(path: Sequence[Message]) -> tuple[list[int], int]:
    """The token ids of a path that ends in an answer, and how many leading ones have had K/V.

    The last sampled token was run through the model only if the model itself ended the answer;
    if none was sampled, maybe not even the question was run.
    """
    ids = [token for message in path for token in message.token_ids]
    if not path or path[-1].finish_reason == "eos":
        return ids, len(ids)
    question, answer = path[-2:]
    return ids, len(ids) - (1 if answer.token_ids else len(question.token_ids))


@dataclass(frozen=True)
class Outcome:
    """How a turn ended; `latency` is None where the engine measured nothing."""

    status: EndStatus
    finish_reason: str | None = None
    error: str | None = None
    latency: Latency | None = None


def outcome_of(
    end: Done | Failed | None, info: EngineInfo, server_ttft_ms: float | None
) -> Outcome:
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
            plan = ""
            if stats.restore_method:
                plan = f"{info.checkpoint_method}: {info.checkpoint_reason}"
            latency = Latency(
                **msgspec.structs.asdict(stats), server_ttft_ms=server_ttft_ms, restore_plan=plan
            )
            return Outcome(
                "stopped" if finish == "cancelled" else "complete", finish, None, latency
            )

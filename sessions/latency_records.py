"""Records of how long turns took: one by one, and summed up over intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from sessions.records import EndStatus, Latency

# Where the history of a turn came from; "unmeasured" is a turn that the engine did not end.
Kind = Literal["first", "resident", "restored", "recomputed", "unmeasured"]
KINDS: tuple[Kind, ...] = ("first", "resident", "restored", "recomputed", "unmeasured")
Measure = Literal["first_token", "between", "queue", "restore", "prediction"]
# Milliseconds, but for `prediction`: what restores took, in per cent of what was predicted.
MEASURES: tuple[Measure, ...] = ("first_token", "between", "queue", "restore", "prediction")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn; `outcome` is None while it runs, `latency` where the engine measured nothing."""

    turn_id: str
    chat_id: str
    message_id: str
    created_at: datetime
    ended_at: datetime | None
    outcome: EndStatus | None
    first_token_ms: float | None
    latency: Latency | None

    @property
    def without_first_token(self) -> str:
        """Why no first token was measured; "" when one was."""
        if self.first_token_ms is not None:
            return ""
        match self.outcome:
            case None:
                return "still running"
            case "stopped":
                return "stopped before the first token"
            case "complete":
                return "the answer is empty"
            case "failed":
                return "failed"
            case "interrupted":
                return "interrupted"

    @property
    def kind(self) -> Kind:
        return kind_of(self.latency)


def kind_of(latency: Latency | None) -> Kind:
    if latency is None:
        return "unmeasured"
    if latency.restored_tokens:
        return "restored"
    if latency.recomputed_tokens:
        return "recomputed"
    return "resident" if latency.resident_tokens else "first"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySums:
    """Sums over turns; `turns` = `first_tokens` + those without one by their four reasons."""

    turns: int = 0
    first_tokens: int = 0
    stopped: int = 0
    failed: int = 0
    interrupted: int = 0
    silent: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    prefix_tokens: int = 0
    prefix_restored_tokens: int = 0
    prefix_computed_tokens: int = 0
    resident_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    prefill_ms: float = 0.0
    restore_ms: float = 0.0
    restore_io_ms: float = 0.0
    restore_compute_ms: float = 0.0
    restore_bytes: int = 0
    predicted_turns: int = 0
    predicted_ms: float = 0.0
    predicted_took_ms: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSums:
    """Sums over the turns of one kind and restoring method that began in one interval."""

    start: int  # seconds since 1970 UTC
    kind: Kind
    method: str  # "" when nothing was restored
    sums: LatencySums


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCounts:
    """The histogram of one measure, by `sessions.latency_histogram`."""

    start: int
    kind: Kind
    measure: Measure
    counts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """All users' turns that began from `since` on (seconds since 1970), in steps of `step` s.

    Running turns are in `running` only. Turns of chats deleted since are among the sums.
    """

    since: int
    step: int
    sums: Sequence[IntervalSums]
    counts: Sequence[IntervalCounts]
    running: int

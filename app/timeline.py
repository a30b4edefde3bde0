"""Where a turn's time went, for the line under its answer and what opens from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sessions.records import Latency

SHOWN_MS = 1.0  # what is shorter is not worth a line
UNITS = 1000  # of the bar's length


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of the bar, in its units."""

    kind: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What happened, how long it took, and what there is to know of it."""

    kind: str
    name: str
    time: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One turn: a line that sums it up, its steps, and the bar that shows them."""

    line: str
    steps: Sequence[Step]
    spans: Sequence[Span]
    continued: bool = False  # a further turn of an answer that was gone on with


def timelines_of(latencies: Sequence[Latency]) -> list[Timeline]:
    """Of an answer's turns, oldest first; none for one whose prompt was never read."""
    return [
        Timeline(line=latency_line(one), steps=_steps(one), spans=_spans(one), continued=number > 0)
        for number, one in enumerate(latencies)
        if was_read(one)
    ]


def last_line(latencies: Sequence[Latency]) -> str:
    """The line of the last of an answer's turns; "" when no prompt of theirs was read."""
    return next((latency_line(one) for one in reversed(latencies) if was_read(one)), "")


def was_read(latency: Latency) -> bool:
    """False for a turn that was stopped in the queue."""
    return latency.server_ttft_ms is not None or latency.prefill_ms > 0


def tokens_per_second(latency: Latency) -> float | None:
    """Of the tokens after the first one; None when there are none."""
    if latency.ttft_ms is None or latency.tokens_out < 2:
        return None
    took_ms = latency.total_ms - latency.ttft_ms
    return (latency.tokens_out - 1) / took_ms * 1e3 if took_ms > 0 else None


def waited_ms(latency: Latency) -> float:
    """Before the first token, neither queued nor restoring nor reading: what came before it.

    The assistant's prompt, when this turn was the one to bring it in, or steps of other chats.
    """
    if latency.ttft_ms is None:
        return 0.0
    known = latency.queue_ms + latency.restore_ms + latency.prefill_ms
    return max(0.0, latency.ttft_ms - known)


def latency_line(latency: Latency) -> str:
    """Where the prompt's tokens came from, how soon the first token came, and how fast the rest."""
    parts = []
    if latency.restored_tokens:
        parts.append(f"restored {_tokens(latency.restored_tokens)} in {_ms(latency.restore_ms)}")
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
    if latency.server_ttft_ms is not None:
        parts.append(f"first token {_ms(latency.server_ttft_ms)}")
    speed = tokens_per_second(latency)
    if speed is not None:
        parts.append(f"{speed:,.1f} tokens/s")
    return ", ".join(parts)


def _steps(latency: Latency) -> list[Step]:
    steps = [Step(kind="queue", name="Queued", time=_ms(latency.queue_ms))]
    if latency.restored_tokens:
        steps.append(
            Step(
                kind="restore",
                name="Restored",
                time=_ms(latency.restore_ms),
                detail=_restore_detail(latency),
            )
        )
    if (waited := waited_ms(latency)) >= SHOWN_MS:
        steps.append(
            Step(kind="waited", name="Waited", time=_ms(waited), detail=_waited_for(latency))
        )
    read = [f"{latency.new_tokens:,} new"]
    if latency.recomputed_tokens:
        read.append(f"{latency.recomputed_tokens:,} recomputed")
    if latency.prefix_computed_tokens:
        read.append(f"{latency.prefix_computed_tokens:,} of the assistant")
    steps.append(
        Step(
            kind="read",
            name="Read",
            time=_ms(latency.prefill_ms),
            detail=f"{', '.join(read)}; of {_tokens(latency.tokens_in)} in all",
        )
    )
    if latency.ttft_ms is None:
        return steps
    first = latency.ttft_ms if latency.server_ttft_ms is None else latency.server_ttft_ms
    steps.append(Step(kind="first", name="First token", time=f"after {_ms(first)}"))
    if latency.tokens_out:
        detail = _tokens(latency.tokens_out)
        speed = tokens_per_second(latency)
        if speed is not None:
            detail += f", {speed:,.1f}/s"
        if latency.itl_p50_ms is not None:
            detail += f"; between two {_ms(latency.itl_p50_ms)}"
        if latency.itl_p95_ms is not None:
            detail += f", for one in twenty {_ms(latency.itl_p95_ms)} or more"
        took = latency.total_ms - latency.ttft_ms
        steps.append(Step(kind="tokens", name="Answered", time=_ms(took), detail=detail))
    if latency.preemptions:
        name = "Made room" if latency.preemptions == 1 else f"Made room {latency.preemptions} times"
        detail = "for other chats, and came back"
        steps.append(Step(kind="preempted", name=name, time="", detail=detail))
    return steps


def _waited_for(latency: Latency) -> str:
    computed, restored = latency.prefix_computed_tokens, latency.prefix_restored_tokens
    ways = [f"{_tokens(restored)} to be restored"] if restored else []
    ways += [f"{_tokens(computed)} to be read"] if computed else []
    return "for the assistant's " + ", ".join(ways) if ways else "for steps of other chats"


def _restore_detail(latency: Latency) -> str:
    """What came back, how, and where the time went, beside what was expected."""
    parts = [
        f"{_tokens(latency.restored_tokens)}, {latency.restore_bytes / 1024:,.0f} KiB",
        f"disk {_ms(latency.restore_io_ms)}, computing {_ms(latency.restore_compute_ms)}",
    ]
    if latency.restored_from_memory:
        parts.append(f"{_tokens(latency.restored_from_memory)} of them from the host's memory")
    if latency.restore_predicted_ms is not None:
        predicted, took = latency.restore_predicted_ms, latency.restore_ms
        parts.append(f"predicted {_ms(predicted)}, took {_ms(took)}")
    if latency.restore_plan:
        parts.append(f"layers: {latency.restore_plan}")
    return "; ".join(parts)


def _spans(latency: Latency) -> list[Span]:
    """What follows one another; the restore's own work overlaps its reads."""
    total = latency.total_ms
    if total <= 0:
        return []
    first = total if latency.ttft_ms is None else latency.ttft_ms
    waited = waited_ms(latency)
    parts = [
        ("queue", 0.0, latency.queue_ms),
        ("restore", latency.queue_ms, latency.queue_ms + latency.restore_ms),
        ("waited", first - latency.prefill_ms - waited, first - latency.prefill_ms),
        ("read", first - latency.prefill_ms, first),
        ("tokens", first, total),
    ]
    spans = []
    for kind, begin, end in parts:
        begin, end = max(0.0, begin), min(total, end)
        if kind == "waited" and waited < SHOWN_MS:
            continue
        start, stop = round(begin / total * UNITS), round(end / total * UNITS)
        if end > begin:
            spans.append(Span(kind=kind, start=start, length=max(2, stop - start)))
    return spans


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"


def _ms(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1e3:,.1f} s"
    return f"{value:,.0f} ms"

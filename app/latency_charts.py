"""Latency records turned into charts, each with the table behind it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from sessions.records import Latency, TurnLatency

BUCKET = timedelta(minutes=5)
Measure = Callable[[Latency], float | None]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line or bar of a chart; None where nothing was measured."""

    label: str
    values: list[float | None]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """What the script draws and the table says. `x` is turn numbers or seconds since 1970 UTC."""

    id: str
    title: str
    unit: str
    kind: Literal["lines", "bars"]
    x_label: str
    x_is_time: bool
    x: list[float]
    x_text: list[str]
    series: list[Series]

    def rows(self) -> list[tuple[str, list[float | None]]]:
        """The table: one row for each x."""
        columns = [one.values for one in self.series]
        return [(text, [c[i] for c in columns]) for i, text in enumerate(self.x_text)]


def percentile(values: Iterable[float | None], percent: int) -> float | None:
    """A percentile of what was measured, between neighbours; None of nothing."""
    known = sorted(value for value in values if value is not None)
    if len(known) < 2:
        return known[0] if known else None
    return statistics.quantiles(known, n=100, method="inclusive")[percent - 1]


def turn_charts(turns: Sequence[TurnLatency]) -> list[Chart]:
    """Charts over the turns of one chat, or of one user, oldest first."""
    latencies = [turn.latency for turn in turns]
    x = [float(number) for number in range(1, len(turns) + 1)]

    def chart(
        id: str, title: str, unit: str, kind: Literal["lines", "bars"], **series: Measure
    ) -> Chart:
        return Chart(
            id=id,
            title=title,
            unit=unit,
            kind=kind,
            x_label="Turn",
            x_is_time=False,
            x=x,
            x_text=[f"{number:.0f}" for number in x],
            series=[
                Series(label=label.replace("_", " "), values=[measure(one) for one in latencies])
                for label, measure in series.items()
            ],
        )

    return [
        chart(
            "first-token",
            "Time to the first token, and what it was spent on",
            "ms",
            "lines",
            first_token=lambda one: one.server_ttft_ms,
            queue=lambda one: one.queue_ms,
            restore=lambda one: one.restore_ms if one.restored_tokens else None,
            prefill=lambda one: one.prefill_ms,
        ),
        chart(
            "tokens",
            "Where the prompt's tokens came from",
            "tokens",
            "bars",
            shared_prefix=lambda one: one.prefix_tokens,
            in_memory=lambda one: one.resident_tokens,
            restored=lambda one: one.restored_tokens,
            recomputed=lambda one: one.recomputed_tokens,
            new=lambda one: one.new_tokens,
        ),
        chart(
            "between-tokens",
            "Time between two tokens",
            "ms",
            "lines",
            median=lambda one: one.itl_p50_ms,
            p95=lambda one: one.itl_p95_ms,
        ),
    ]


def server_charts(turns: Sequence[TurnLatency]) -> list[Chart]:
    """Charts over all users' turns, summed up in intervals: no chat can be told apart."""
    buckets: dict[datetime, list[Latency]] = {}
    for turn in turns:
        since = turn.created_at - datetime(1970, 1, 1, tzinfo=UTC)
        start = turn.created_at - since % BUCKET
        buckets.setdefault(start, []).append(turn.latency)
    starts = sorted(buckets)

    def chart(
        id: str,
        title: str,
        unit: str,
        kind: Literal["lines", "bars"],
        **series: Callable[[list[Latency]], float | None],
    ) -> Chart:
        return Chart(
            id=id,
            title=title,
            unit=unit,
            kind=kind,
            x_label="Five minutes from (UTC)",
            x_is_time=True,
            x=[start.timestamp() for start in starts],
            x_text=[start.strftime("%Y-%m-%d %H:%M") for start in starts],
            series=[
                Series(
                    label=label.replace("_", " "), values=[sums(buckets[start]) for start in starts]
                )
                for label, sums in series.items()
            ],
        )

    return [
        chart(
            "server-first-token",
            "Time to the first token, all chats",
            "ms",
            "lines",
            median=lambda ones: percentile((one.server_ttft_ms for one in ones), 50),
            p95=lambda ones: percentile((one.server_ttft_ms for one in ones), 95),
        ),
        chart(
            "server-tokens",
            "Where the prompts' tokens came from, all chats",
            "tokens",
            "bars",
            shared_prefix=lambda ones: sum(one.prefix_tokens for one in ones),
            in_memory=lambda ones: sum(one.resident_tokens for one in ones),
            restored=lambda ones: sum(one.restored_tokens for one in ones),
            recomputed=lambda ones: sum(one.recomputed_tokens for one in ones),
            new=lambda ones: sum(one.new_tokens for one in ones),
        ),
        chart(
            "server-between-tokens",
            "Time between two tokens, median of the turns' medians",
            "ms",
            "lines",
            median=lambda ones: percentile((one.itl_p50_ms for one in ones), 50),
        ),
        chart("server-turns", "Turns", "turns", "bars", turns=lambda ones: len(ones)),
    ]

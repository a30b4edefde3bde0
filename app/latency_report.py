"""All chats' latency summed up, as the operator's page shows it: no chat can be told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from app.latency_charts import Chart, Kind, Series
from sessions.latency_histogram import MAX_ERROR, percentile
from sessions.latency_records import IntervalSums, LatencyReport, LatencySums, Measure
from sessions.queries.latency_sums import DAY_S, FINE_S, HOUR_S
from sessions.repository import Repository

RangeName = Literal["hour", "day", "week", "month", "all"]
PERCENTS = (50, 90, 99)
RETURNING = ("resident", "restored", "recomputed")
ORIGINS = {
    "first": "first turns",
    "resident": "in memory",
    "restored": "restored",
    "recomputed": "recomputed",
}


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """How far back, from which sums, and in which steps; None: from the first turn on."""

    words: str
    level: int
    length: int | None
    step: int | None


RANGES: dict[RangeName, Range] = {
    "hour": Range(words="Hour", level=FINE_S, length=HOUR_S, step=FINE_S),
    "day": Range(words="Day", level=HOUR_S, length=DAY_S, step=HOUR_S),
    "week": Range(words="Week", level=HOUR_S, length=7 * DAY_S, step=4 * HOUR_S),
    "month": Range(words="Month", level=DAY_S, length=30 * DAY_S, step=DAY_S),
    "all": Range(words="All", level=DAY_S, length=None, step=None),
}


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """One measure over so many turns, each within `MAX_ERROR` of the value of that rank."""

    name: str
    unit: str
    turns: int
    values: list[float | None]


class Restores(msgspec.Struct, frozen=True, kw_only=True):
    """What came back in one way."""

    method: str
    turns: int
    tokens: int
    bytes: int
    took_ms: float
    tokens_per_s: float | None
    took_of_predicted: float | None  # per cent


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a range; `turns` + `running` is every turn that began in it."""

    since: datetime | None
    max_error: float
    turns: int
    running: int
    first_tokens: int
    without: dict[str, int]
    percentiles: list[Percentiles]
    restores: list[Restores]
    shared_tokens: int
    shared_bytes: int
    restored_tokens: int
    recomputed_tokens: int
    tokens_out: int
    preemptions: int


async def read_report(repository: Repository, name: RangeName, now: datetime) -> LatencyReport:
    """The sums of a range; it begins with a whole interval."""
    chosen = RANGES[name]
    since = None
    if chosen.length is not None:
        since = (int(now.timestamp()) - chosen.length) // chosen.level * chosen.level
    return await repository.latency_report(level=chosen.level, since=since, step=chosen.step)


def summary_of(report: LatencyReport, *, bytes_per_token: int) -> Summary:
    """`bytes_per_token` is what the K/V of one token takes in the model that runs now."""
    total = add_up(one.sums for one in report.sums)
    shared = total.prefix_tokens - total.prefix_restored_tokens - total.prefix_computed_tokens
    return Summary(
        since=datetime.fromtimestamp(report.since, UTC) if report.since else None,
        max_error=MAX_ERROR,
        turns=total.turns,
        running=report.running,
        first_tokens=total.first_tokens,
        without={
            "stopped before the first token": total.stopped,
            "failed": total.failed,
            "interrupted": total.interrupted,
            "the answer is empty": total.silent,
            "still running": report.running,
        },
        percentiles=_percentiles(report),
        restores=_restores(report.sums),
        shared_tokens=shared,
        shared_bytes=shared * bytes_per_token,
        restored_tokens=total.restored_tokens,
        recomputed_tokens=total.recomputed_tokens,
        tokens_out=total.tokens_out,
        preemptions=total.preemptions,
    )


def add_up(sums: Iterable[LatencySums]) -> LatencySums:
    found = list(sums)
    return LatencySums(
        **{
            name: sum(getattr(one, name) for one in found)
            for name in LatencySums.__dataclass_fields__
        }
    )


def server_charts(report: LatencyReport) -> list[Chart]:
    """Charts over time; an interval in which no turn began is left out."""
    starts = sorted({one.start for one in report.sums})
    by_start: dict[int, list[IntervalSums]] = {}
    for one in report.sums:
        by_start.setdefault(one.start, []).append(one)

    def chart(id: str, title: str, unit: str, kind: Kind, series: list[Series]) -> Chart:
        return Chart(
            id=f"server-{id}",
            title=title,
            unit=unit,
            kind=kind,
            x_label=f"{_length(report.step)} from (UTC)",
            x_is_time=True,
            x=[float(start) for start in starts],
            x_text=[_moment(start, report.step) for start in starts],
            series=series,
            x_step=float(report.step),
        )

    def percents(measure: Measure) -> list[Series]:
        found = _by_start(report, measure)
        return [
            Series(
                label=f"p{percent}",
                values=[percentile(found.get(start, {}), percent) for start in starts],
            )
            for percent in PERCENTS
        ]

    def medians() -> list[Series]:
        groups = {"first turns": ("first",), **{ORIGINS[kind]: (kind,) for kind in RETURNING}}
        found = {words: _by_start(report, "first_token", kinds) for words, kinds in groups.items()}
        return [
            Series(label=words, values=[percentile(one.get(start, {}), 50) for start in starts])
            for words, one in found.items()
        ]

    def sums(**measures: Callable[[LatencySums], float | None]) -> list[Series]:
        totals = [add_up(one.sums for one in by_start[start]) for start in starts]
        return [
            Series(label=label.replace("_", " "), values=[measure(one) for one in totals])
            for label, measure in measures.items()
        ]

    def turns_by_origin() -> list[Series]:
        words = {**ORIGINS, "unmeasured": "not measured"}
        return [
            Series(
                label=label,
                values=[
                    sum(one.sums.turns for one in by_start[start] if one.kind == kind)
                    for start in starts
                ],
            )
            for kind, label in words.items()
        ]

    return [
        chart("first-token", "Time to the first token", "ms", "lines", percents("first_token")),
        chart(
            "returning",
            "Median time to the first token, by where the chat's state came from",
            "ms",
            "lines",
            medians(),
        ),
        chart("between-tokens", "Time between two tokens", "ms", "lines", percents("between")),
        chart(
            "tokens",
            "Where the prompts' tokens came from",
            "tokens",
            "bars",
            sums(
                shared_prefix=lambda one: one.prefix_tokens,
                in_memory=lambda one: one.resident_tokens,
                restored=lambda one: one.restored_tokens,
                recomputed=lambda one: one.recomputed_tokens,
                new=lambda one: one.new_tokens,
            ),
        ),
        chart(
            "restore-rate",
            "Restored tokens for each second of restoring",
            "tokens/s",
            "lines",
            sums(restored=lambda one: _rate(one.restored_tokens, one.restore_ms)),
        ),
        chart("turns", "Turns", "turns", "bars", turns_by_origin()),
    ]


def _percentiles(report: LatencyReport) -> list[Percentiles]:
    rows: list[tuple[str, str, Measure, tuple[str, ...] | None]] = [
        ("First token, all turns", "ms", "first_token", None),
        ("First token, first turns", "ms", "first_token", ("first",)),
        ("First token, returning turns", "ms", "first_token", RETURNING),
        ("  still in memory", "ms", "first_token", ("resident",)),
        ("  restored", "ms", "first_token", ("restored",)),
        ("  recomputed", "ms", "first_token", ("recomputed",)),
        ("Between two tokens (medians of the turns)", "ms", "between", None),
        ("Waiting in the queue", "ms", "queue", None),
        ("Restoring", "ms", "restore", None),
        ("Restoring, of what was predicted", "%", "prediction", None),
    ]
    found = []
    for name, unit, measure, kinds in rows:
        counts: dict[int, int] = {}
        for one in report.counts:
            if one.measure == measure and (kinds is None or one.kind in kinds):
                for bucket, turns in one.counts.items():
                    counts[bucket] = counts.get(bucket, 0) + turns
        values = [percentile(counts, percent) for percent in PERCENTS]
        found.append(Percentiles(name=name, unit=unit, turns=sum(counts.values()), values=values))
    return found


def _restores(sums: Sequence[IntervalSums]) -> list[Restores]:
    by_method: dict[str, list[LatencySums]] = {}
    for one in sums:
        if one.sums.restored_tokens:
            by_method.setdefault(one.method, []).append(one.sums)
    found = {method: add_up(ones) for method, ones in sorted(by_method.items())}
    return [
        Restores(
            method=method,
            turns=one.turns,
            tokens=one.restored_tokens,
            bytes=one.restore_bytes,
            took_ms=one.restore_ms,
            tokens_per_s=_rate(one.restored_tokens, one.restore_ms),
            took_of_predicted=one.predicted_took_ms / one.predicted_ms * 100
            if one.predicted_ms
            else None,
        )
        for method, one in found.items()
    ]


def _by_start(
    report: LatencyReport, measure: Measure, kinds: Sequence[str] | None = None
) -> dict[int, dict[int, int]]:
    """The histograms of a measure, those of all kinds together."""
    found: dict[int, dict[int, int]] = {}
    for one in report.counts:
        if one.measure == measure and (kinds is None or one.kind in kinds):
            counts = found.setdefault(one.start, {})
            for bucket, turns in one.counts.items():
                counts[bucket] = counts.get(bucket, 0) + turns
    return found


def _rate(tokens: int, took_ms: float) -> float | None:
    return tokens / took_ms * 1e3 if tokens and took_ms > 0 else None


def _moment(start: int, step: int) -> str:
    shape = "%Y-%m-%d" if step >= DAY_S else "%Y-%m-%d %H:%M"
    return datetime.fromtimestamp(start, UTC).strftime(shape)


def _length(step: int) -> str:
    for seconds, word in ((DAY_S, "day"), (HOUR_S, "hour"), (60, "minute")):
        if step % seconds == 0:
            number = step // seconds
            return word.capitalize() if number == 1 else f"{number} {word}s"
    return f"{step} seconds"

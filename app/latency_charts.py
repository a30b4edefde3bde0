"""Latency records turned into charts, each with the table behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from app.timeline import waited_ms
from sessions.latency_records import TurnRecord
from sessions.records import Latency

# Lines join what follows one another, points do not, bars are stacked.
Kind = Literal["lines", "points", "bars"]
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
    kind: Kind
    x_label: str
    x_is_time: bool
    x: list[float]
    x_text: list[str]
    series: list[Series]
    x_step: float = 1.0  # between neighbours, where none is missing

    def rows(self) -> list[tuple[str, list[float | None]]]:
        """The table: one row for each x."""
        columns = [one.values for one in self.series]
        return [(text, [c[i] for c in columns]) for i, text in enumerate(self.x_text)]


def turn_charts(turns: Sequence[TurnRecord], *, first: int) -> list[Chart]:
    """Charts over turns of one chat, oldest first; `first` is the number of the first one."""
    numbers = range(first, first + len(turns))

    def chart(id: str, title: str, unit: str, kind: Kind, **series: Measure) -> Chart:
        return _chart(
            id,
            title,
            unit,
            kind,
            [
                Series(
                    label=label.replace("_", " "),
                    values=[
                        None if turn.latency is None else measure(turn.latency) for turn in turns
                    ],
                )
                for label, measure in series.items()
            ],
        )

    def _chart(id: str, title: str, unit: str, kind: Kind, series: list[Series]) -> Chart:
        return Chart(
            id=id,
            title=title,
            unit=unit,
            kind=kind,
            x_label="Turn",
            x_is_time=False,
            x=[float(number) for number in numbers],
            x_text=[str(number) for number in numbers],
            series=series,
        )

    origins = {"first": "first turn", "resident": "in memory"}
    origins |= {"restored": "restored", "recomputed": "recomputed"}
    by_origin = [
        Series(
            label=words,
            values=[turn.first_token_ms if turn.kind == kind else None for turn in turns],
        )
        for kind, words in origins.items()
    ]
    # Cut off by the end of the engine: the first token is known, and nothing else.
    cut_off = [turn.first_token_ms if turn.kind == "unmeasured" else None for turn in turns]
    if any(value is not None for value in cut_off):
        by_origin.append(Series(label="interrupted", values=cut_off))
    return [
        _chart(
            "first-token",
            "Time to the first token, by where the chat's state came from",
            "ms",
            "points",
            by_origin,
        ),
        chart(
            "parts",
            "What the first token waited for",
            "ms",
            "bars",
            queue=lambda one: one.queue_ms,
            restore=lambda one: one.restore_ms if one.restored_tokens else None,
            waiting=waited_ms,
            read=lambda one: one.prefill_ms,
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
            "prediction",
            "Restoring, predicted and measured",
            "ms",
            "lines",
            measured=lambda one: one.restore_ms if one.restored_tokens else None,
            predicted=lambda one: one.restore_predicted_ms if one.restored_tokens else None,
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

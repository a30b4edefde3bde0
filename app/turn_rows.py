"""A turn of a chat as the latency page shows it: a row for each thing that took time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.timeline import UNITS, Span, Step, Timeline, timelines_of
from sessions.latency_records import TurnRecord
from sessions.records import Latency

KIND_WORDS = {
    "first": "first turn",
    "resident": "still in memory",
    "restored": "restored",
    "recomputed": "recomputed",
    "unmeasured": "not measured",
}
LANES = {"read": "disk", "compute": "computing", "recompute": "recomputing"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step with its part of the turn's time; `inner` ones show the restore magnified."""

    step: Step
    spans: Sequence[Span]
    inner: bool = False


@dataclass(frozen=True, kw_only=True)
class TurnView:
    """One turn; without `rows` there is nothing that was measured, and `without` says why."""

    number: int
    record: TurnRecord
    kind: str
    without: str
    line: str = ""
    rows: Sequence[Row] = ()


def turn_views(records: Sequence[TurnRecord], *, first: int) -> list[TurnView]:
    """`first` is the number of the first of them in its chat, counted from 1."""
    return [_view(record, number) for number, record in enumerate(records, start=first)]


def _view(record: TurnRecord, number: int) -> TurnView:
    timelines = [] if record.latency is None else timelines_of([record.latency])
    without = record.without_first_token
    kind = KIND_WORDS[record.kind]
    if record.latency is None or not timelines:
        return TurnView(number=number, record=record, kind=kind, without=without)
    return TurnView(
        number=number,
        record=record,
        kind=kind,
        without=without,
        line=timelines[0].line,
        rows=_rows(record.latency, timelines[0]),
    )


def _rows(latency: Latency, timeline: Timeline) -> list[Row]:
    rows = []
    for step in timeline.steps:
        spans = [span for span in timeline.spans if span.kind == step.kind]
        if step.kind == "first" and latency.ttft_ms is not None and latency.total_ms > 0:
            start = min(UNITS - 4, round(latency.ttft_ms / latency.total_ms * UNITS))
            spans = [Span(kind="first", start=start, length=4)]
        rows.append(Row(step=step, spans=spans))
        if step.kind == "restore":
            rows += _restore_rows(latency)
    return rows


def _restore_rows(latency: Latency) -> list[Row]:
    """What the disk and the processor did meanwhile, over the length of the restore."""
    spans = latency.restore_spans
    if not spans:
        return []
    begin = min(start for _, start, *_ in spans)
    length = max(end for _, _, end, *_ in spans) - begin
    rows = []
    for kind, name in LANES.items():
        lane = [(start, end) for found, start, end, *_ in spans if found == kind]
        if not lane or length <= 0:
            continue
        took = sum(end - start for start, end in lane)
        step = Step(kind=kind, name=name, time=f"{took:,.0f} ms")
        bars = [_span(kind, start - begin, end - begin, length) for start, end in lane]
        rows.append(Row(step=step, spans=bars, inner=True))
    return rows


def _span(kind: str, begin: float, end: float, total: float) -> Span:
    start = min(UNITS - 2, round(begin / total * UNITS))
    return Span(kind=kind, start=start, length=max(2, round(end / total * UNITS) - start))

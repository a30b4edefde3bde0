"""The restore plan in use, beside what pure methods would take, as this machine was measured."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.planning import NotMeasured, Question, kept, plan_lines
from app.settings import Settings
from engine.errors import EngineError

TOKENS = 2048  # of the chat that the plan is shown for
_BETWEEN_CELLS = re.compile(r"\s{2,}")


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What `rejoinder plan` prints, in its parts; the first cell of each row is its name."""

    subject: list[str]
    head: list[str]
    rows: list[list[str]]
    reason: str


def plan_report(settings: Settings) -> PlanReport | None:
    """None where this machine was not measured, as on CUDA; measures nothing."""
    question = Question(
        tokens=TOKENS,
        prefix=0,
        disk_mbps=None,
        geometry=None,
        target_ms=None,
        bits=settings.checkpoint_bits,
    )
    try:
        found = kept(settings)
        if found is None:
            return None
        lines = plan_lines(found, question)
    except (NotMeasured, EngineError):
        return None
    first = lines.index("")
    last = lines.index("", first + 1)
    head, *rows = lines[first + 1 : last]
    return PlanReport(
        subject=lines[:first],
        head=["", *_BETWEEN_CELLS.split(head.strip())],
        rows=[_BETWEEN_CELLS.split(row) for row in rows],
        reason=lines[last + 1],
    )

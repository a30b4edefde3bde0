"""The soak's own judgements: each of them can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.soak import figure, report
from tests.e2e.soak_judge import NEEDED, Verdict, judge_coverage, judge_log, judge_memory

MIB = 2.0**20


def life(seconds: int, web: float, engine: float, leak_mib_s: float) -> list[tuple[float, float]]:
    """Samples of a process that fills its caches for 20 s and, maybe, leaks for ever."""
    return [
        ((web + min(second, 20)) * MIB, (engine + 2 * min(second, 20) + leak_mib_s * second) * MIB)
        for second in range(seconds)
    ]


@pytest.mark.parametrize(
    ("seconds", "leak_mib_s", "wrong"),
    [(10, 0, 0), (12, 60, 1), (25, 0, 0), (100, 0, 0), (100, 5, 1), (200, 0.1, 0), (200, 0.8, 1)],
)
def test_memory_is_flat_in_short_and_in_long_lives(
    seconds: int, leak_mib_s: float, wrong: int
) -> None:
    verdict = Verdict()
    judge_memory([life(seconds, 180, 400, leak_mib_s), []], verdict)
    assert len(verdict.wrong) == wrong, verdict.wrong
    assert all("engine process, life 0" in one for one in verdict.wrong)


def test_what_never_happened_is_wrong() -> None:
    verdict = Verdict()
    verdict.counts.update(dict.fromkeys(NEEDED, 1))
    judge_coverage(300, verdict)
    assert verdict.wrong == []
    verdict.counts["engine: evictions"] = 0
    judge_coverage(300, verdict)
    assert verdict.wrong == ["not one engine: evictions"]


def test_a_log_entry_that_nobody_meant_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "log0"
    log.write_text(
        "2026 INFO app: fine\n2026 WARNING app: preempted 17\n"
        "2026 ERROR engine.client: the engine process 7 ended with code -9\n"
    )
    verdict = Verdict()
    judge_log(log, verdict)
    assert verdict.wrong == []
    assert verdict.counts["log: app: preempted N"] == 1
    log.write_text("2026 ERROR app: no\nTraceback (most recent call last):\n")
    judge_log(log, verdict)
    assert len(verdict.wrong) == 2


def test_the_report_is_short_and_names_what_is_wrong() -> None:
    verdict = Verdict()
    verdict.counts.update({"stop": 3, "engine: evictions": 1200, "message 409": 2})
    text = report(verdict, 60, 64, 1)
    assert "engine: evictions 1,200" in text
    assert text.endswith("nothing is wrong")
    verdict.wrong.append("a message is lost")
    assert report(verdict, 60, 64, 1).endswith("WRONG: a message is lost\n1 things are wrong")
    assert figure("# HELP\nrejoinder_evictions_total 5.0\n", "evictions_total") == 5

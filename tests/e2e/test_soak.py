"""Thirty seconds of the soak; `python -m tests.e2e.soak` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.soak import Soak, report

SECONDS = 30.0
CLIENTS = 64


@pytest.mark.slow
def test_half_a_minute_with_two_kills(tmp_path: Path) -> None:
    verdict = Soak(tmp_path, SECONDS, CLIENTS, seed=1).run()
    print(report(verdict, SECONDS, CLIENTS, 1))
    assert verdict.wrong == []
    assert verdict.counts["messages acknowledged"] > 0
    assert verdict.counts["answers judged"] > 0
    assert verdict.counts["answers after a restore"] > 0

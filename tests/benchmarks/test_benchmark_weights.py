"""benchmarks.weights: its rows, from figures whose answers are known."""

from __future__ import annotations

from benchmarks.weights import format_rows, time_rows
from engine.profile.weight_figures import FormatFigures, WeightFigures

FIGURES = WeightFigures(
    fp32_loss=2.0,
    tokens=1024,
    rows=(1, 32),
    formats=(
        FormatFigures(
            format="bf16", loss=2.002, agreement=0.98, step_s=(0.02, 0.04), num_bytes=3 << 20
        ),
        FormatFigures(
            format="int8", loss=2.02, agreement=0.97, step_s=(0.01, 0.02), num_bytes=2 << 20
        ),
        FormatFigures(
            format="int4", loss=2.004, agreement=0.96, step_s=(0.005, 0.02), num_bytes=1 << 20
        ),
    ),
)


def test_rows_of_formats() -> None:
    rows = format_rows(FIGURES)
    assert [row["loss_rise"] for row in rows] == [0.001, 0.01, 0.002]
    assert [row["mib"] for row in rows] == [3.0, 2.0, 1.0]
    assert [row["verdict"] == "taken" for row in rows] == [False, False, True]
    assert "loss" in rows[1]["verdict"]


def test_rows_of_times() -> None:
    rows = time_rows(FIGURES)
    assert len(rows) == 6
    assert rows[2] == {"rows": 1, "format": "int4", "ms": 5.0, "ratio": 4.0}
    assert rows[3]["ratio"] == 1.0

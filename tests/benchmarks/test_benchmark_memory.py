"""benchmarks.memory on a tiny model: what is needed follows from shapes, what is held is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory
from benchmarks.step import Sizes
from engine.model.model_config import read_model_config


def test_rows(
    quick: Callable[..., tuple[int, dict[str, Any] | None, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "QUICK", Sizes((3,), (130,), ("greedy",), 4, 60.0, (64,)))
    status, result, _ = quick(memory.main, "--weights", "fp32")
    assert status == 0
    assert result is not None
    (row,) = result["rows"]
    assert (row["weights"], row["chats"], row["prefix"]) == ("fp32", 3, 130)
    assert row["kv_mib"] > 0
    assert row["needed_mib"] == pytest.approx(row["weights_mib"] + row["kv_mib"] + 300, abs=0.3)
    assert row["peak_mib"] >= row["resident_mib"] > row["kv_mib"]
    assert result["ratio"] == row["ratio"] > 0


def test_weights_are_counted_in_their_format(tiny_model: Path) -> None:
    config = read_model_config(tiny_model)
    table = config.vocab_size * config.hidden_size
    plain = memory.weight_bytes(config, "bf16", 2)
    few = memory.weight_bytes(config, "int4", 2)
    packed = plain / 2 - table
    assert plain == 2 * (packed + table)
    assert few == pytest.approx(packed * 0.625 + 2 * table)

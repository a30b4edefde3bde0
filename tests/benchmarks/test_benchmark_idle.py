"""`benchmarks.idle`: the contract with few chats; a chat that does not come back is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import idle
from benchmarks.report import Options, Refused

OPTIONS = Options(
    quick=True, json=True, model_dir=Path("none"), dtype="auto", extra=argparse.Namespace()
)
FIGURES = {
    "store_open",
    "store_find",
    "store_save",
    "database_open",
    "chat_open",
    "chat_list",
}


def test_a_row_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUICK", (2, 5))
    monkeypatch.setattr(idle, "TRIES", 2)
    result = idle.measure(OPTIONS)
    assert [row["chats"] for row in result["rows"]] == [2, 5]
    assert result["growth"].keys() == result["cpu_growth"].keys() == FIGURES
    assert all(row[f"{name}_ms"] > 0 for row in result["rows"] for name in FIGURES)


def test_a_chat_that_does_not_come_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUICK", (2,))
    monkeypatch.setattr(idle, "TRIES", 2)
    monkeypatch.setattr(idle, "_reads_back", lambda store, chat_id: False)
    with pytest.raises(Refused, match="did not come back"):
        idle.measure(OPTIONS)

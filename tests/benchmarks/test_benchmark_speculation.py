"""benchmarks.speculation on a tiny model: both sides answer; other answers are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import speculation
from engine.choosing import choose
from engine.speculation import Draft, PromptLookup

Quick = Callable[..., tuple[int, dict[str, Any] | None, str]]
SIZES = speculation.Sizes(batches=(1, 2), answer=20, rounds=1)


def test_rows(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "QUICK", SIZES)
    status, result, _ = quick(speculation.main, "--dtype", "fp32")
    assert status == 0
    assert result is not None
    rows = result["rows"]
    assert [(row["kind"], row["chats"]) for row in rows] == [
        ("quoting", 1),
        ("quoting", 2),
        ("prose", 1),
        ("prose", 2),
    ]
    assert all(row["same"] == 1.0 and 0 <= row["right"] <= 1 for row in rows)
    assert all(row["auto_ms"] > 0 and row["never_ms"] > 0 for row in rows)
    assert result["least_ratio"] == min(row["ratio"] for row in rows)


def test_an_answer_that_drafts_changed_is_refused(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "QUICK", SIZES)
    monkeypatch.setattr("engine.speculation.FIRST_GUESS", 0.0)

    def seven(lookup: PromptLookup, limit: int, worth: float) -> Draft:
        return [(7, 1.0)][:limit]

    monkeypatch.setattr(PromptLookup, "draft", seven)

    def believing(*arguments: Any) -> Any:
        """Takes every draft for right."""
        chosen = choose(*arguments)
        for one in chosen:
            if one.segment.draft:
                one.tokens[:] = [*one.segment.draft, one.tokens[-1]]
                one.scores[:] = [None] * len(one.tokens)
        return chosen

    monkeypatch.setattr("engine.engine.choose", believing)
    status, result, text = quick(speculation.main, "--dtype", "fp32")
    assert status == 1
    assert result is None
    assert "drafts changed an answer" in text

"""When one read of a node for all its rows is worth it."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model import sharing_gate
from engine.model.sharing_gate import SharingGate, measure_attention
from engine.profile.record import AttentionCosts


def costs(ratios: list[list[float]]) -> AttentionCosts:
    """A table whose costs of sharing are these over those of not sharing."""
    return AttentionCosts(
        rows=(2, 8, 32),
        tokens=(64, 1024),
        shared_s=tuple(tuple(r * 1e-4 for r in line) for line in ratios),
        own_s=((1e-4,) * 2,) * 3,
    )


TABLE = costs([[1.4, 0.9], [1.1, 0.5], [0.8, 0.3]])


def test_measured_places_are_decided_as_measured() -> None:
    gate = SharingGate(TABLE)
    assert [gate.shares(64, rows) for rows in (2, 8, 32)] == [False, False, True]
    assert [gate.shares(1024, rows) for rows in (2, 8, 32)] == [True, True, True]


def test_between_measured_places_costs_are_in_between() -> None:
    gate = SharingGate(TABLE)
    assert gate.cost_ratio(256, 8) == pytest.approx(math.sqrt(1.1 * 0.5))
    assert gate.cost_ratio(64, 16) == pytest.approx(math.sqrt(1.1 * 0.8))
    assert gate.cost_ratio(9000, 500) == pytest.approx(0.3)


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 1), (1024, 0), (63, 32), (0, 64)])
def test_less_than_was_measured_is_never_shared(tokens: int, rows: int) -> None:
    assert not SharingGate(TABLE).shares(tokens, rows)


def test_a_gain_within_the_noise_is_none() -> None:
    assert not SharingGate(costs([[0.97, 0.97]] * 3)).shares(1024, 32)
    assert SharingGate(costs([[0.93, 0.93]] * 3)).shares(1024, 32)


@given(st.lists(st.lists(st.floats(0.1, 3.0), min_size=2, max_size=2), min_size=3, max_size=3))
def test_more_rows_and_longer_nodes_never_turn_sharing_off(ratios: list[list[float]]) -> None:
    """Whatever was measured: the table is made monotone, and stays within its values."""
    gate = SharingGate(costs(ratios))
    sizes = (64, 100, 300, 1024, 5000)
    rows = (2, 3, 8, 20, 32, 64)
    table = [[gate.cost_ratio(t, r) for t in sizes] for r in rows]
    low, high = min(map(min, ratios)), max(map(max, ratios))
    for line in table:
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(line))
        assert all(low - 1e-9 <= value <= high + 1e-9 for value in line)
    for column in zip(*table, strict=True):
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(column))


def test_a_table_that_does_not_fit_its_axes_is_refused() -> None:
    broken = msgspec.structs.replace(TABLE, rows=(2, 8))
    with pytest.raises(ValueError, match="for \\(2, 8\\)"):
        SharingGate(broken)


def test_measuring_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place is filled with times that grow with the work; many rows over much are shared."""
    monkeypatch.setattr(sharing_gate, "TOKENS", (64, 1024))
    monkeypatch.setattr(sharing_gate, "ROWS", (2, 32))
    measured = measure_attention(4, 4, 64, torch.float32, budget_s=0.2)
    assert (measured.rows, measured.tokens) == ((2, 32), (64, 1024))
    for table in (measured.shared_s, measured.own_s):
        assert all(0 < seconds < 1 for line in table for seconds in line)
    assert measured.own_s[1][1] > measured.own_s[0][0]
    assert SharingGate(measured).shares(1024, 32)

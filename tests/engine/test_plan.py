"""Which method a server's setting means for a model's geometry."""

from __future__ import annotations

import pytest

from engine.restoration.plan import choose_plan


@pytest.mark.parametrize(
    ("hidden_size", "kv_size", "expected"),
    [
        (576, 192, "kv"),  # SmolLM2-135M: hidden states take 1.5x the bytes
        (2048, 2048, "hidden"),  # multi-head attention: half the bytes
        (4096, 1024, "kv"),  # Llama-3-8B: 2x
        (1024, 512, "kv"),  # the same bytes, and no projection
    ],
)
def test_auto_takes_what_is_smaller(hidden_size: int, kv_size: int, expected: str) -> None:
    plan = choose_plan("auto", 4, hidden_size, kv_size)
    assert plan.methods == (expected,) * 4
    assert plan.name == expected
    assert f"{hidden_size / (2 * kv_size):.2f}x" in plan.reason


def test_a_method_that_is_asked_for_is_taken() -> None:
    for method in ("hidden", "kv", "recompute"):
        plan = choose_plan(method, 3, 576, 192)
        assert plan.methods == (method,) * 3
        assert method in plan.reason


def test_bytes_of_a_token() -> None:
    assert choose_plan("kv", 30, 576, 192).bytes_per_token(576, 192, 2) == 30 * 2 * 192 * 2
    assert choose_plan("hidden", 30, 576, 192).bytes_per_token(576, 192, 2) == 30 * 576 * 2
    assert choose_plan("recompute", 30, 576, 192).bytes_per_token(576, 192, 2) == 0

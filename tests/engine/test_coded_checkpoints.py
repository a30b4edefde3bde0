"""Checkpoints in 8 and 6 bits: every plan comes back, close to what a never evicted chat says.

How far a real model's next-token distributions move is `benchmarks.coding`'s to measure; here it is
bounded on the tiny model, whose logits are far more sensitive than a trained one's: wrong layers,
rows, scales or positions move them by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.loading
from engine import choosing
from engine.config import CheckpointBits
from engine.errors import ModelError
from engine.model.sampler import sample
from engine.restoration.plan import CheckpointPlan, LayerMethod, OnePlan, plan_name
from tests.engine.harness import Harness, HarnessFactory, make_tiny_model, random_ids

PREFIX = random_ids(100, 1)
NEW = random_ids(9, 8)
LENGTHS = (1, 63, 64, 65, 300)
STORED: list[tuple[LayerMethod, ...]] = [
    ("hidden", "hidden", "hidden"),
    ("recompute", "hidden", "hidden"),
    ("hidden", "hidden", "kv"),
    ("recompute", "hidden", "kv"),
    ("recompute", "recompute", "kv"),
    ("kv", "kv", "kv"),
]
# mean divergence, nats, of a restored chat's next token; the greatest is that of K/V: 2.3e-2
LIMIT = 6e-2


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every row of logits that was sampled from, in order."""
    rows: list[Tensor] = []

    def spy(values: Tensor, *args: object, **kwargs: object) -> object:
        rows.extend(values.clone())
        return sample(values, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(choosing, "sample", spy)
    return rows


Make = Callable[[Path, CheckpointBits, tuple[LayerMethod, ...]], Harness]


@pytest.fixture
def planned(make_engine: HarnessFactory, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(disk: Path, bits: CheckpointBits, methods: tuple[LayerMethod, ...]) -> Harness:
        plans = OnePlan(CheckpointPlan(plan_name(methods), methods, "by the test"))
        monkeypatch.setattr(engine.loading, "make_plans", lambda *_: plans)
        return make_engine(disk=disk, checkpoint_bits=bits, checkpoint_method="hidden")

    return make


def turn(harness: Harness, chat: str, history: list[int], new: list[int], *, behind: bool) -> str:
    request = harness.submit(
        new, chat=chat, prefix=PREFIX if behind else [], history=history, max_tokens=1
    )
    harness.run()
    return request


def divergence(reference: list[Tensor], other: list[Tensor]) -> float:
    assert len(reference) == len(other)
    p = torch.stack(reference).double().log_softmax(-1)
    q = torch.stack(other).double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("bits", [8, 6])
@pytest.mark.parametrize("methods", STORED, ids=plan_name)
def test_every_plan_comes_back(
    planned: Make,
    make_engine: HarnessFactory,
    logits: list[Tensor],
    tmp_path: Path,
    bits: CheckpointBits,
    methods: tuple[LayerMethod, ...],
) -> None:
    cases = [(length, behind) for behind in (True, False) for length in LENGTHS]
    harness = planned(tmp_path, bits, methods)
    for i, (length, behind) in enumerate(cases):  # resident: the reference, saved on the way
        first = random_ids(length, 7)
        turn(harness, f"c{i}", [], first, behind=behind)
    logits.clear()
    for i, (length, behind) in enumerate(cases):
        turn(harness, f"c{i}", random_ids(length, 7), NEW, behind=behind)
    resident = list(logits)
    make_engine.close(harness)
    harness = planned(tmp_path, bits, methods)
    logits.clear()
    for i, (length, behind) in enumerate(cases):
        request = turn(harness, f"c{i}", random_ids(length, 7), NEW, behind=behind)
        stats = harness.done(request).stats
        assert stats.restored_tokens == length
        assert stats.recomputed_tokens == 0
    assert 0 < divergence(resident, list(logits)) < LIMIT
    assert harness.engine.stats().stripes_rejected == 0


@pytest.mark.parametrize("bits", [8, 6])
def test_a_partial_stripe_grows_over_many_restarts(
    planned: Make,
    make_engine: HarnessFactory,
    logits: list[Tensor],
    tmp_path: Path,
    bits: CheckpointBits,
) -> None:
    """Its restored rows are coded again with each return; the error stays that of one coding."""
    methods: tuple[LayerMethod, ...] = ("hidden", "hidden", "kv")
    ids = random_ids(63, 5)
    harness = planned(tmp_path / "never", bits, methods)
    turn(harness, "a", [], ids[:20], behind=False)
    for end in range(24, 63, 4):
        turn(harness, "a", ids[: end - 4], ids[end - 4 : end], behind=False)
    reference = logits[1:]
    make_engine.close(harness)
    logits.clear()
    for end in (20, *range(24, 63, 4)):
        harness = planned(tmp_path / "often", bits, methods)
        at = max(0, end - 4) if end > 20 else 0
        turn(harness, "a", ids[:at], ids[at:end], behind=False)
        make_engine.close(harness)
    assert divergence(reference, logits[1:]) < LIMIT


def test_another_number_of_bits_is_a_miss(
    planned: Make, make_engine: HarnessFactory, tmp_path: Path
) -> None:
    """A server that is set back to 16 bits restores nothing that is not exact."""
    methods: tuple[LayerMethod, ...] = ("kv", "kv", "kv")
    history = random_ids(100, 7)
    every: tuple[CheckpointBits, ...] = (8, 16, 6)
    for i, bits in enumerate(every):
        harness = planned(tmp_path, bits, methods)
        request = turn(harness, "a", history if i else [], NEW if i else history, behind=False)
        assert harness.done(request).stats.restored_tokens == 0
        make_engine.close(harness)


def test_bytes_on_disk_are_those_that_the_engine_tells(
    make_engine: HarnessFactory, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path, checkpoint_method="kv", checkpoint_bits=8)
    assert harness.engine.info.bytes_per_token_checkpoint == 3 * 2 * 2 * (64 + 2)
    turn(harness, "a", [], random_ids(640, 3), behind=False)
    assert harness.store is not None
    harness.store.flush(10)
    used = harness.engine.stats().disk_bytes
    stored = 640 * harness.engine.info.bytes_per_token_checkpoint
    assert stored < used < stored + 10 * 8192


def test_a_family_whose_stream_cannot_be_rotated(tmp_path: Path) -> None:
    """Its hidden states cannot be coded, which is said at the start; its K/V can."""
    model_dir = make_tiny_model(tmp_path / "olmo", num_kv_heads=4, family="Olmo2")
    factory = HarnessFactory(model_dir)
    with pytest.raises(ModelError, match="cannot be rotated"):
        factory(disk=tmp_path / "refused", checkpoint_bits=8)
    harness = factory(disk=tmp_path / "disk", checkpoint_bits=8, checkpoint_method="kv")
    assert harness.engine.info.checkpoint_method == "kv"
    factory.close(harness)

"""A chat comes back exactly, whatever was stored of its layers (fp32, greedy).

Oracle: transformers' own generation over the same ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine.loading
from engine.messages import Cancel
from engine.restoration.plan import (
    METHODS,
    CheckpointPlan,
    LayerMethod,
    Plans,
    Prediction,
    RestoredPart,
    plan_name,
)
from sessions.chunks import ChunkStore
from sessions.chunks.read_stream import ReadStream
from sessions.chunks.types import LoadedStripe
from tests.engine.harness import Harness, HarnessFactory, Oracle, random_ids

LAYERS = 3
PREFIX = random_ids(100, 1)  # ends inside a page
EVERY: list[tuple[LayerMethod, ...]] = list(
    itertools.combinations_with_replacement(METHODS, LAYERS)
)


@dataclass
class Listed:
    """Plans in turn, one for each stripe that is saved."""

    methods: list[tuple[LayerMethod, ...]]
    given: int = 0
    restored: list[list[RestoredPart]] = field(default_factory=list)

    def plan(self, prefix_tokens: int, num_tokens: int) -> CheckpointPlan:
        chosen = self.methods[self.given % len(self.methods)]
        self.given += 1
        return CheckpointPlan(plan_name(chosen), chosen, "by the test")

    def hidden_layers(self, context_length: int) -> tuple[int, ...]:
        plans = [CheckpointPlan("", m, "") for m in self.methods]
        return tuple(sorted({layer for plan in plans for layer in plan.hidden_layers}))

    def predict(self, parts: Iterable[RestoredPart]) -> Prediction | None:
        self.restored.append(list(parts))
        return Prediction(12.5, 10.0, 2.5)


Planned = Callable[..., Harness]


@pytest.fixture
def planned(make_engine: HarnessFactory, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Makes engines that save by these plans."""

    def make(disk: Path, *methods: tuple[LayerMethod, ...], **config: object) -> Harness:
        plans: Plans = Listed(list(methods))
        monkeypatch.setattr(engine.loading, "make_plans", lambda *_: plans)
        return make_engine(disk=disk, **config)

    return make


def answer(
    harness: Harness, history: list[int], new: list[int], prefix: list[int], chat: str = "a"
) -> str:
    """Run one turn; the id of its request."""
    computed = max(0, len(history) - 1)
    request = harness.submit(new, chat=chat, prefix=prefix, history=history, computed=computed)
    harness.run()
    return request


@pytest.mark.parametrize("methods", EVERY, ids=plan_name)
def test_every_plan(
    planned: Planned,
    make_engine: HarnessFactory,
    oracle: Oracle,
    tmp_path: Path,
    methods: tuple[LayerMethod, ...],
) -> None:
    """Restarted: the prefix comes back by the same plan, and the chat's absent layers wait."""
    cases = [(length, prefix) for prefix in (PREFIX, []) for length in (1, 63, 64, 65, 300)]
    histories: list[list[int]] = []
    harness = planned(tmp_path, methods)
    for i, (length, prefix) in enumerate(cases):
        first = random_ids(length, 7)
        request = answer(harness, [], first, prefix, f"c{i}")
        histories.append(first + harness.ids(request))
    make_engine.close(harness)
    harness = planned(tmp_path, methods)
    plan = CheckpointPlan("", methods, "")
    stored = len(plan.hidden_layers) + len(plan.kv_layers)
    for i, (_, prefix) in enumerate(cases):
        history, new = histories[i], random_ids(9, 8)
        request = answer(harness, history, new, prefix, f"c{i}")
        assert harness.ids(request) == oracle.greedy(prefix + history + new, 12)
        stats = harness.done(request).stats
        expected = len(history) - 1 if stored else 0
        assert stats.restored_tokens == expected
        assert stats.recomputed_tokens == len(history) - 1 - expected
        if stored:
            # one layer that is not stored needs its projection only: its input is at hand
            assert ("recompute" in stats.restore_method) == (LAYERS - stored > 1)
            assert stats.prefix_restored_tokens == (len(PREFIX) if i == 0 else 0)


def test_what_a_restore_is_predicted_for(
    planned: Planned, make_engine: HarnessFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of stripes that are stored alike, with the layers that really run, and their bytes."""
    first: tuple[LayerMethod, ...] = ("recompute", "hidden", "kv")
    then: tuple[LayerMethod, ...] = ("hidden", "hidden", "hidden")
    plans = Listed([first, first, first, then])
    harness = planned(tmp_path, first)
    monkeypatch.setattr(engine.loading, "make_plans", lambda *_: plans)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    plans.given = 0
    history = random_ids(300, 3)
    history += harness.ids(answer(harness, [], history, []))
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    stats = harness.done(answer(harness, history, random_ids(5, 4), [])).stats
    assert stats.restore_plan == "1 recompute + 1 hidden + 1 kv, hidden"
    assert stats.restore_predicted_ms == 12.5
    row = 4 * 128  # bytes of one row of hidden states, of K, or of V
    # 1 layer in full, 1 projected from its output, 1 copied; then 3 projected, the first from the
    # embedding; then the partial stripe by the first plan again
    assert plans.restored[-1] == [
        RestoredPart(0, 192, 1, 1, 1, 192 * 2 * row),
        RestoredPart(192, 64, 0, 3, 0, 64 * 2 * row),
        RestoredPart(256, 55, 1, 1, 1, 55 * 2 * row),
    ]


def test_a_long_chat(
    planned: Planned, make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """More than one slice, and two turns more on top of it, one of them after another restart."""
    plan: tuple[LayerMethod, ...] = ("recompute", "recompute", "kv")
    history = random_ids(1000, 3)
    for turn in range(3):
        harness = planned(tmp_path, plan)
        new = random_ids(20, 40 + turn)
        request = answer(harness, history if turn else [], new if turn else history + new, PREFIX)
        assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
        if turn:
            assert harness.done(request).stats.recomputed_tokens == 0
        history = history + new + harness.ids(request)
        make_engine.close(harness)


@given(
    data=st.data(),
    length=st.integers(1, 400),
    seed=st.integers(0, 50),
)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_stripes_of_random_plans_in_one_chat(
    planned: Planned,
    make_engine: HarnessFactory,
    oracle: Oracle,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    length: int,
    seed: int,
) -> None:
    """Every stripe has a plan of its own; those that store nothing are holes to recompute."""
    plans = data.draw(st.lists(st.sampled_from(EVERY), min_size=1, max_size=6))
    disk = tmp_path_factory.mktemp("random")
    harness = planned(disk, *plans)
    first = random_ids(length, seed)
    history = first + harness.ids(answer(harness, [], first, PREFIX))
    make_engine.close(harness)
    new = random_ids(9, seed + 100)
    ids, gap = oracle.choices(PREFIX + history + new, 12)
    harness = planned(disk, *plans)
    request = answer(harness, history, new, PREFIX)
    if gap > 5e-3:  # rests on no tie
        assert harness.ids(request) == ids
    stats = harness.done(request).stats
    assert stats.restored_tokens + stats.recomputed_tokens == len(history) - 1
    make_engine.close(harness)


@pytest.mark.parametrize("methods", [EVERY[2], EVERY[3], EVERY[4], EVERY[7]], ids=plan_name)
def test_a_lost_stripe_costs_its_own_tokens_only(
    planned: Planned,
    make_engine: HarnessFactory,
    oracle: Oracle,
    tmp_path: Path,
    methods: tuple[LayerMethod, ...],
) -> None:
    """Layers that are not stored run over the hole first, so that later stripes stay valid."""
    harness = planned(tmp_path, methods)
    first = random_ids(400, 9)
    history = first + harness.ids(answer(harness, [], first, []))
    make_engine.close(harness)
    harness = planned(tmp_path, methods)
    store = harness.store
    assert isinstance(store, ChunkStore)
    lose_stripe(store, tmp_path, "c-a", 128)
    new = random_ids(9, 10)
    request = answer(harness, history, new, [])
    assert harness.ids(request) == oracle.greedy(history + new, 12)
    stats = harness.done(request).stats
    assert stats.recomputed_tokens == 64
    assert stats.restored_tokens == len(history) - 1 - 64


def lose_stripe(store: ChunkStore, directory: Path, owner: str, start: int) -> None:
    """Flip a byte in the payload of the owner's stripe at this token."""
    with store._catalog.lock:
        entry = store._catalog.entry(owner)
        assert entry is not None
        stripes = [s for (at, _), group in entry.stripes.items() if at == start for s in group]
        name, offset = entry.file, stripes[0].offset
    path = next(directory.glob(f"**/{name}"))
    with path.open("r+b") as file:
        file.seek(offset + 2048)
        byte = file.read(1)[0]
        file.seek(offset + 2048)
        file.write(bytes([byte ^ 0xFF]))


def test_layers_run_again_when_the_lost_prefix_is_back(
    planned: Planned, make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """The chat is on disk and its prefix is not: its layers attend to the prefix, so they wait."""
    plan: tuple[LayerMethod, ...] = ("recompute", "recompute", "kv")
    harness = planned(tmp_path, plan, prefill_chunk=16)
    first = random_ids(200, 14)
    history = first + harness.ids(answer(harness, [], first, PREFIX))
    assert harness.store is not None
    harness.store.flush(10.0)
    harness.store.forget(["p-"])
    make_engine.close(harness)
    harness = planned(tmp_path, plan, prefill_chunk=16)
    new = random_ids(9, 15)
    request = answer(harness, history, new, PREFIX)
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
    stats = harness.done(request).stats
    assert (stats.prefix_restored_tokens, stats.prefix_computed_tokens) == (0, len(PREFIX))
    assert stats.restored_tokens == len(history) - 1


class OneByOne:
    """Reads that come in late and one at a time."""

    def __init__(self, inner: ReadStream) -> None:
        self._inner = inner
        self._kept: list[LoadedStripe] = []
        self._polls = 0

    def poll(self, timeout_s: float = 0.0) -> list[LoadedStripe]:
        self._kept.extend(self._inner.poll(timeout_s))
        self._polls += 1
        return [self._kept.pop(0)] if self._kept and self._polls > 20 else []

    @property
    def finished(self) -> bool:
        return self._inner.finished and not self._kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("lost", [None, 64], ids=["whole", "a stripe lost"])
def test_layers_that_are_not_stored_do_not_wait_for_the_disk(
    planned: Planned,
    make_engine: HarnessFactory,
    oracle: Oracle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: int | None,
) -> None:
    """They have run over all tokens before the first stripe comes in; later ones follow singly."""
    plans: list[tuple[LayerMethod, ...]] = [("recompute", "recompute", "kv")] * 5
    plans += [("recompute", "hidden", "kv")] * 4
    harness = planned(tmp_path, *plans)
    first = random_ids(500, 24)
    history = first + harness.ids(answer(harness, [], first, []))
    make_engine.close(harness)
    harness = planned(tmp_path, *plans)
    assert harness.store is not None
    if lost is not None:
        lose_stripe(harness.store, tmp_path, "c-a", lost)
    new = random_ids(9, 25)
    request = harness.submit(new, history=history, computed=len(history) - 1)
    read = ChunkStore.read
    monkeypatch.setattr(ChunkStore, "read", lambda *a, **more: OneByOne(read(*a, **more)))
    harness.run()
    assert harness.ids(request) == oracle.greedy(history + new, 12)
    stats = harness.done(request).stats
    assert stats.restored_tokens == len(history) - 1 - (0 if lost is None else 64)
    spans = stats.restore_spans
    last_run = max(end for kind, _, end, *_ in spans if kind == "recompute")
    first_put = min(start for kind, start, *_, layers in spans if kind == "compute" and layers)
    assert last_run <= first_put
    again = random_ids(7, 26)  # the last stripe, which was not full, goes on from its hidden states
    history += new + harness.ids(request)
    harness.run()
    make_engine.close(harness)
    monkeypatch.undo()
    harness = planned(tmp_path, *plans)
    request = answer(harness, history, again, [])
    assert harness.ids(request) == oracle.greedy(history + again, 12)


def test_a_branch_inside_a_stripe(
    planned: Planned, make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """Only the leading tokens of a stripe are used, and what follows them is run behind them."""
    plan: tuple[LayerMethod, ...] = ("recompute", "hidden", "kv")
    harness = planned(tmp_path, plan)
    first = random_ids(150, 11)
    answer(harness, [], first, PREFIX)
    make_engine.close(harness)
    harness = planned(tmp_path, plan)
    for keep in (100, 70, 130):
        history, new = first[:keep], random_ids(8, keep)
        request = answer(harness, history, new, PREFIX)
        assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)


def test_cancelled_at_every_stage_of_a_restore(
    planned: Planned, make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    """Memory is whole after each (the harness checks at every step), and the next turn is right."""
    plan: tuple[LayerMethod, ...] = ("recompute", "recompute", "kv")
    harness = planned(tmp_path, plan)
    first = random_ids(500, 12)
    history = first + harness.ids(answer(harness, [], first, PREFIX))
    new = random_ids(9, 13)
    for steps in range(1, 9):
        make_engine.close(harness)
        harness = planned(tmp_path, plan)
        request = harness.submit(new, prefix=PREFIX, history=history, computed=len(history) - 1)
        for _ in range(steps):
            harness.step()
        harness.engine.handle(Cancel(request_id=request))
        harness.run()
    request = answer(harness, history, new, PREFIX)
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)


def test_preempted_chats_come_back(planned: Planned, oracle: Oracle, tmp_path: Path) -> None:
    """More chats than memory holds: some make room in mid-answer, with stripes of a mixed plan."""
    page = 64 * 3 * 2 * 2 * 64 * 4
    methods: tuple[LayerMethod, ...] = ("recompute", "hidden", "kv")
    harness = planned(tmp_path, methods, kv_memory_bytes=10 * page, max_context=500)
    prompts = [random_ids(50 + 5 * i, 60 + i) for i in range(6)]
    requests = [
        harness.submit(p, chat=f"c{i}", prefix=PREFIX, max_tokens=60) for i, p in enumerate(prompts)
    ]
    harness.run()
    assert harness.engine.stats().preemptions > 0
    assert harness.engine.stats().tokens_restored > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert harness.ids(request) == oracle.greedy(PREFIX + prompt, 60)


def test_others_decode_while_layers_run_again(
    planned: Planned, make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    plan: tuple[LayerMethod, ...] = ("recompute", "recompute", "kv")
    harness = planned(tmp_path, plan)
    first = random_ids(600, 21)
    history = first + harness.ids(answer(harness, [], first, PREFIX))
    make_engine.close(harness)
    harness = planned(tmp_path, plan)
    running = harness.submit(random_ids(10, 26), chat="b", prefix=PREFIX, max_tokens=40)
    while len(harness.ids(running)) < 3:
        harness.step()
    new = random_ids(5, 34)
    request = harness.submit(new, prefix=PREFIX, history=history, computed=len(history) - 1)
    harness.run()
    assert harness.ids(request) == oracle.greedy(PREFIX + history + new, 12)
    assert harness.ids(running) == oracle.greedy(PREFIX + random_ids(10, 26), 40)
    assert harness.done(request).stats.recomputed_tokens == 0

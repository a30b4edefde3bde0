"""Captured decode steps: what is in the buffers is what the step runs on, whatever was before.

On the CPU a "captured" step is the function itself, called again on the static buffers, and its
attention reads what was filled in last; on CUDA it is a real graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.cuda_graphs as graphs_module
from engine.cuda_graphs import (
    MAX_LEVELS,
    Capture,
    CudaCapture,
    Replay,
    power_of_two,
    with_empty_rows,
)
from kernels.prefix_choice import prefix_attention_torch
from kernels.spans import Spans
from tests.engine.graph_world import World, tiny_weights


@dataclass
class Place:
    device: str
    capture: Capture
    captured: list[Callable[[], None]]


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    captured: list[Callable[[], None]] = []
    if request.param == "cuda":
        real = CudaCapture()

        def capture(run: Callable[[], None]) -> Replay:
            captured.append(run)
            return real(run)

        return Place("cuda", capture, captured)

    def again(run: Callable[[], None]) -> Replay:
        captured.append(run)
        return run

    return Place("cpu", again, captured)


def _assert_same(ours: Tensor, expected: Tensor) -> None:
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=2e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def _grow(world: World, steps: int, seed: int) -> list[Tensor]:
    """Chats join and leave at random while the others go on; logits of all steps."""
    draw = random.Random(seed)
    above = world.node(None, 70, 1)
    document = world.node(above, 130, 2)
    deeper = world.node(document, 1, 3)
    other = world.node(None, 64, 4)
    places = [above, document, deeper, other, None]
    world.join(above, 50, 10)
    logits = []
    for step in range(steps):
        if draw.random() < 0.5 and len(world.chats) < 11:
            world.join(draw.choice(places), draw.choice([1, 20, 63, 64]), 20 + step)
        if draw.random() < 0.25 and len(world.chats) > 1:
            world.leave(draw.randrange(len(world.chats)))
        logits.append(world.step())
    return logits


@pytest.mark.parametrize("share", [True, False])
def test_replayed_steps_are_those_that_run_one_by_one(place: Place, share: bool) -> None:
    """Rows join, leave and grow over page ends; nodes above them come and go; ids are the same."""
    weights = tiny_weights(place.device)
    eager = World(weights, share, None)
    graphed = World(weights, share, place.capture)
    expected = _grow(eager, 40, 0)
    ours = _grow(graphed, 40, 0)
    for step, reference in zip(ours, expected, strict=True):
        _assert_same(step, reference)
    for a, b in zip(eager.chats, graphed.chats, strict=True):
        assert a.seq.ids == b.seq.ids
    graphs = graphed.runner.graphs
    assert graphs is not None
    assert graphs.replayed == 40
    assert graphs.captured == len(place.captured) < 20


def test_left_over_rows_touch_nothing(place: Place) -> None:
    """Five rows in a graph of eight: the other three write to the scratch page alone."""
    world = World(tiny_weights(place.device), True, place.capture)
    node = world.node(None, 65, 1)
    for i in range(5):
        world.join(node, 60 + i, 10 + i)
    for _ in range(10):
        world.step()
    held = [node.seq, *(chat.seq for chat in world.chats)]
    assert world.unwritten(held).isnan().all()
    assert not world.cache.kv[:, :, -64:].isnan().all()


def test_one_graph_serves_all_lengths_and_sharers(place: Place) -> None:
    """Steps with five to seven rows, one or two groups, lengths over a page end: one graph."""
    world = World(tiny_weights(place.device), True, place.capture)
    first, second = world.node(None, 65, 1), world.node(None, 100, 2)
    for i in range(5):
        world.join(first, 60 + i, 10 + i)
    for i in range(8):
        if i in (2, 4):
            world.join(second, 10 * i, 30 + i)
        world.step()
    assert len(place.captured) == 1


def test_steps_beyond_what_is_captured_run_without(place: Place) -> None:
    """Too many rows, too many levels: the results are the same, and nothing is captured."""
    weights = tiny_weights(place.device)
    worlds = World(weights, True, None), World(weights, True, place.capture, max_rows=2)
    results = []
    for world in worlds:
        node = world.node(None, 64, 1)
        for i in range(3):
            world.join(node, 5, 10 + i)
        results.append(world.step())
        world.leave(0)
        world.leave(0)
        for i in range(MAX_LEVELS):
            node = world.node(node, 64, 2 + i)
        world.join(node, 5, 20)
        results.append(world.step())
    _assert_same(results[2], results[0])
    _assert_same(results[3], results[1])
    assert worlds[1].runner.graphs is not None
    assert (worlds[1].runner.graphs.replayed, place.captured) == (0, [])


def test_the_least_used_graph_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 2)
    weights = tiny_weights(place.device)
    eager, world = World(weights, True, None), World(weights, True, place.capture)
    for count in (1, 2, 1, 4, 1, 2):  # rows: of the graphs of 1, 2 and 4, that of 2 is made twice
        for each in (eager, world):
            while len(each.chats) < count:
                each.join(None, 9, 10 + len(each.chats))
            while len(each.chats) > count:
                each.leave(len(each.chats) - 1)
        _assert_same(world.step(), eager.step())
    assert len(place.captured) == 4


def test_logits_are_not_overwritten_by_eager_steps(place: Place) -> None:
    """A prompt read between two steps leaves the first one's logits alone."""
    world = World(tiny_weights(place.device), True, place.capture)
    world.join(None, 9, 1)
    first = world.step()
    world.join(None, 30, 2)
    world.leave(1)
    again = World(tiny_weights(place.device), True, None)
    again.join(None, 9, 1)
    _assert_same(first, again.step())
    _assert_same(world.step(), again.step())


def test_shapes_are_rounded_up() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 8, 9, 256)] == [1, 2, 4, 8, 16, 256]
    spans = Spans.build([(0, 1, [([3, 4], 100)], False), (1, 2, [([5], 1)], False)])
    padded = with_empty_rows(spans, 2, 8, range(1, 3))
    assert padded.rows[:, [0, 1, 3]].tolist() == [[0, 1, 0], [1, 2, 0], [2, 8, 1], [2, 8, 2]]
    assert padded.num_keys.tolist() == [100, 1, 0, 0]
    assert with_empty_rows(spans, 2, 2, range(1)) is spans
    assert np.array_equal(padded.pages, spans.pages)


def test_the_prefix_kernel_of_steps_that_are_not_captured(place: Place) -> None:
    """Prompts behind shared nodes and decode steps run by the kernel that was chosen."""
    dtype = torch.float32 if place.device == "cpu" else torch.bfloat16
    weights = tiny_weights(place.device, dtype)
    calls = 0

    def counted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        prefix_attention_torch(*arguments)

    # what follows a choice that rounding turned over says nothing
    steps = 6 if dtype == torch.float32 else 1
    chosen = _grow(World(weights, True, None, prefix_kernel=counted), steps, seed=7)
    assert calls > 0
    usual = _grow(World(weights, True, None), steps, seed=7)
    for ours, expected in zip(chosen, usual, strict=True):
        if dtype == torch.float32:
            _assert_same(ours, expected)
        else:
            torch.testing.assert_close(ours, expected, rtol=0.1, atol=0.5)

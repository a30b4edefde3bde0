"""Where the time of an engine's step goes: clocks around the calls that a step is made of."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import engine.choosing
import engine.model.attention
import engine.model.decoder
import engine.model_runner
from engine.engine import Engine
from engine.model.weights import LayerWeights, Weights

PARTS = (
    "projections",
    "prefix_attention",
    "suffix_attention",
    "merge",
    "norms_rope",
    "head",
    "sampling",
    "checkpoint",
    "scheduling",
    "answers",
)
# Functions by the module that calls them, and the part that each is counted in.
_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (engine.model.attention, "decode_attention", "suffix_attention"),
    (engine.model.attention, "prefill_attention", "suffix_attention"),
    (engine.model.attention, "prefix_attention", "prefix_attention"),
    (engine.model.attention, "merge_states", "merge"),
    (engine.model.decoder, "rms_norm", "norms_rope"),
    (engine.model.decoder, "add_rms_norm", "norms_rope"),
    (engine.model.decoder, "qk_norm", "norms_rope"),
    (engine.model.decoder, "silu_mul", "norms_rope"),
    (engine.model.decoder, "write_kv", "norms_rope"),
    (engine.choosing, "sample", "sampling"),
    (engine.choosing, "token_logprobs", "sampling"),
    (engine.model_runner, "build_batch", "scheduling"),
)


class Clocks:
    """Owns the seconds of each part since `begin`. One thread; parts never nest."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._calls: Counter[str] = Counter()
        self._cost = 0.0
        self._cost = self._own_cost()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted in a part."""
        seconds, calls, clock = self._seconds, self._calls, time.perf_counter

        def call(*args: Any, **more: Any) -> Any:
            began = clock()
            result = function(*args, **more)
            seconds[part] += clock() - began
            calls[part] += 1
            return result

        return call

    def begin(self) -> None:
        """Forget what was counted."""
        for part in self._seconds:
            self._seconds[part] = 0.0
        self._calls.clear()

    def end(self, total_s: float) -> dict[str, float]:
        """Milliseconds of each part, and of `python`: what is left of a step's `total_s`.

        What the clocks themselves cost is taken off.
        """
        parts = {part: seconds * 1e3 for part, seconds in self._seconds.items()}
        left = total_s * 1e3 - sum(parts.values()) - self._calls.total() * self._cost * 1e3
        return {**parts, "python": max(0.0, left)}

    def _own_cost(self) -> float:
        """Seconds that a clock adds to a call and does not count."""
        idle = self.timed(PARTS[0], int)
        best = float("inf")
        for _ in range(20):
            self.begin()
            began = time.perf_counter()
            for _ in range(1000):
                idle()
            spent = time.perf_counter() - began
            best = min(best, (spent - self._seconds[PARTS[0]]) / 1000)
        self.begin()
        return best


def _timed_weights(weights: Weights, clocks: Clocks) -> Weights:
    """The same weights, whose projections and head are timed."""

    def layer(own: LayerWeights) -> LayerWeights:
        names = ("qkv", "o", "gate_up", "down")
        timed: dict[str, Any] = {
            name: clocks.timed("projections", getattr(own, name)) for name in names
        }
        return replace(own, **timed)

    layers = tuple(layer(own) for own in weights.layers)
    return replace(weights, layers=layers, head=clocks.timed("head", weights.head))


@contextmanager
def clocks_in(inference: Engine, clocks: Clocks) -> Iterator[None]:
    """Have the engine's steps timed by parts; as it was afterwards."""
    decoder, scheduler, runner = inference.runner.decoder, inference.scheduler, inference.runner
    places: list[tuple[Any, str, str]] = list(_FUNCTIONS)
    places += [(scheduler, name, "scheduling") for name in ("admit", "schedule")]
    places += [(scheduler.resident, "evict_older_than", "scheduling")]
    places += [(inference, "_push", "answers")]
    recorder = runner._recorder
    if recorder is not None:
        places += [(recorder, name, "checkpoint") for name in ("begin_step", "record", "end_step")]
    kept = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in places]
    weights = decoder.weights
    decoder.weights = _timed_weights(weights, clocks)
    try:
        for owner, name, part in places:
            setattr(owner, name, clocks.timed(part, getattr(owner, name)))
        yield
    finally:
        decoder.weights = weights
        for owner, name, own in kept:
            if own is None:  # a method, found on its class
                delattr(owner, name)
            else:
                setattr(owner, name, own)

"""From measured figures to plans: one machine, one model, chats of any length. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.memory.page_pool import pages_for
from engine.profile.record import ComputeCosts, DiskRead
from engine.profile.shapes import Shape
from engine.restoration.coding import Coding
from engine.restoration.plan import (
    CheckpointPlan,
    LayerCosts,
    Prediction,
    RestoredPart,
    fastest,
    makespan,
)

LEAST_TOKENS = 1024  # a chat is expected to grow at least so long
MESSAGE_TOKENS = 32  # of a short message, whose answer's first token is waited for


class Planner:
    """Chooses the plan of a chat as it is saved. Immutable but for what it remembers."""

    def __init__(self, shape: Shape, coding: Coding, compute: ComputeCosts, disk: DiskRead) -> None:
        self.shape = shape
        self.compute = compute
        self.disk = disk
        self.coding = coding
        self._plans: dict[tuple[int, int], CheckpointPlan] = {}

    def costs(self, prefix_tokens: int, num_tokens: int) -> LayerCosts:
        """One layer over `num_tokens` private tokens behind a shared prefix."""
        shape, compute = self.shape, self.compute
        message = compute.layer(MESSAGE_TOKENS, prefix_tokens + num_tokens)
        return LayerCosts(
            num_layers=shape.num_layers,
            recompute_s=compute.layer(num_tokens, prefix_tokens),
            hidden_s=self._hidden_s(num_tokens),
            kv_s=self._kv_s(num_tokens),
            hidden_bytes=num_tokens * self.coding.hidden_bytes(shape.hidden_size),
            kv_bytes=num_tokens * self.coding.kv_bytes(shape.num_kv_heads, shape.head_dim),
            bytes_per_s=self.disk.bytes_per_s,
            latency_s=self.disk.latency_s,
            stripes=pages_for(num_tokens),
            request_bytes=self.disk.first_bytes,
            answer_s=shape.num_layers * message,
        )

    def _hidden_s(self, num_tokens: int) -> float:
        """Seconds from one layer's stored hidden states to its K/V."""
        bits = self.coding.bits
        each = 0.0 if bits == 16 else self.compute.code_s[f"hidden{bits}"]
        return self.compute.hidden(num_tokens) + num_tokens * self.shape.hidden_size * each

    def _kv_s(self, num_tokens: int) -> float:
        """Seconds from one layer's stored K/V to its pages."""
        if self.coding.bits == 16:
            return self.compute.kv(num_tokens)
        return num_tokens * 2 * self.shape.kv_size * self.compute.code_s["kv8"]

    def plan(self, prefix_tokens: int, num_tokens: int) -> CheckpointPlan:
        """The plan for a chat that has `num_tokens` private tokens now, and is expected to grow.

        The same for all lengths up to the next power of two, which is what it is made for.
        """
        key = (_prefix_step(prefix_tokens), _step(num_tokens, LEAST_TOKENS))
        plan = self._plans.get(key)
        if plan is None:
            plan = fastest(self.costs(*key))
            reason = f"{plan.reason}, for {key[1]} tokens behind {key[0]} shared ones"
            plan = self._plans[key] = replace(plan, reason=reason)
        return plan

    def hidden_layers(self, context_length: int) -> tuple[int, ...]:
        """Layers whose hidden states any plan within this context stores, ascending."""
        layers: set[int] = set()
        for prefix in (0, *_steps(64, context_length // 2)):
            for tokens in _steps(LEAST_TOKENS, context_length):
                layers.update(self.plan(prefix, tokens).hidden_layers)
        return tuple(sorted(layers))

    def predict(self, parts: Iterable[RestoredPart]) -> Prediction:
        """What a restore of stripes of any plans takes: I/O and compute summed, then the larger."""
        costs = self.compute
        compute, num_bytes, tokens = 0.0, 0, 0
        for part in parts:
            count = part.num_tokens
            compute += part.recompute * costs.layer(count, part.start)
            compute += part.hidden * self._hidden_s(count) + part.kv * self._kv_s(count)
            num_bytes += part.num_bytes
            tokens += count
        io = num_bytes / self.disk.bytes_per_s
        total = makespan(compute, io, num_bytes, max(1, pages_for(tokens)), self.disk.first_bytes)
        if num_bytes:
            total += self.disk.latency_s
        return Prediction(total * 1e3, io * 1e3, compute * 1e3)


def _prefix_step(num_tokens: int) -> int:
    return _step(num_tokens, 64) if num_tokens else 0


def _step(num_tokens: int, least: int) -> int:
    """The next power of two, from `least` on."""
    return max(least, 1 << (num_tokens - 1).bit_length())


def _steps(first: int, limit: int) -> list[int]:
    """All that `_step` gives for numbers up to `limit`."""
    steps = [first]
    while steps[-1] < limit:
        steps.append(2 * steps[-1])
    return steps

"""Which layers of a checkpoint are stored as hidden states, as K/V, or not at all. Torch-free.

A chat that comes back needs the K/V of all its layers. Each layer has one of three methods:

- `recompute`: nothing is stored; the layer runs again from the token ids. The first r layers.
- `hidden`: the layer's input is stored; one projection gives its K and V back. The next h layers.
- `kv`: K and V are stored as they are. The last k layers.

Reads and compute overlap, so a restore takes about as long as the slower of the two. A slow disk
favours recomputing the first layers, a slow processor storing K/V; hidden states are half as large
as K/V with multi-head attention, and larger than K/V where few KV heads serve many heads
(D > 2 d_kv): there they are never stored. The best (r, h, k) is found by trying them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.config import CheckpointMethod

LayerMethod = Literal["hidden", "kv", "recompute"]

METHODS: tuple[LayerMethod, ...] = ("recompute", "hidden", "kv")
TIE = 1.05  # plans that take at most so much longer than the fastest: the smallest of them wins


@dataclass(frozen=True)
class Prediction:
    """What a restore is expected to take, milliseconds; reads and compute overlap."""

    total_ms: float
    io_ms: float
    compute_ms: float


@dataclass(frozen=True)
class CheckpointPlan:
    """The method of each layer, and why; `name` is what a user reads.

    The recomputed layers come first, then those from hidden states, then those from K/V.
    `predicted` is None where it was not chosen by its times.
    """

    name: str
    methods: tuple[LayerMethod, ...]
    reason: str
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        order = [METHODS.index(method) for method in self.methods]
        if order != sorted(order):
            raise ValueError(f"the layers {self.methods} are not in the order {METHODS}")

    @property
    def at_hand(self) -> int | None:
        """The layer whose input needs no bytes: the first after the recomputed ones, if hidden."""
        first = next((i for i, m in enumerate(self.methods) if m != "recompute"), None)
        return first if first is not None and self.methods[first] == "hidden" else None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states are stored."""
        at_hand = self.at_hand
        return tuple(i for i, m in enumerate(self.methods) if m == "hidden" and i != at_hand)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers whose K/V are stored."""
        return tuple(i for i, m in enumerate(self.methods) if m == "kv")

    def bytes_per_token(self, hidden_bytes: int, kv_bytes: int) -> int:
        """Bytes on disk for one token, given those of one layer (see `Coding`)."""
        return len(self.hidden_layers) * hidden_bytes + len(self.kv_layers) * kv_bytes


@dataclass(frozen=True)
class RestoredPart:
    """A run of tokens of a restore that come back in one way."""

    start: int  # tokens before them, shared prefix included
    num_tokens: int
    recompute: int  # layers run in full
    hidden: int  # layers projected, from stored hidden states or what is at hand
    kv: int  # layers copied
    num_bytes: int  # read

    @property
    def name(self) -> str:
        """The methods as a plan's name."""
        counts = (self.recompute, self.hidden, self.kv)
        return plan_name(
            tuple(m for m, count in zip(METHODS, counts, strict=True) for _ in range(count))
        )


class Plans(Protocol):
    """Where a recorder gets the plan of a chat from."""

    def plan(self, prefix_tokens: int, num_tokens: int) -> CheckpointPlan:
        """For a chat that has so many private tokens now, behind so many shared ones."""

    def hidden_layers(self, context_length: int) -> tuple[int, ...]:
        """Layers whose hidden states any plan within this context stores, ascending."""

    def predict(self, parts: Iterable[RestoredPart]) -> Prediction | None:
        """What a restore of stripes of any plans takes; None where nothing was measured."""


@dataclass(frozen=True)
class OnePlan:
    """The same plan for every chat, whatever it costs."""

    value: CheckpointPlan

    def plan(self, prefix_tokens: int, num_tokens: int) -> CheckpointPlan:
        return self.value

    def hidden_layers(self, context_length: int) -> tuple[int, ...]:
        return self.value.hidden_layers

    def predict(self, parts: Iterable[RestoredPart]) -> Prediction | None:
        return None


@dataclass(frozen=True)
class LayerCosts:
    """One layer over all private tokens of a chat, and what the disk gives; seconds and bytes."""

    num_layers: int
    recompute_s: float
    hidden_s: float
    kv_s: float
    hidden_bytes: int
    kv_bytes: int
    bytes_per_s: float
    latency_s: float = 0.0  # until bytes flow
    stripes: int = 1  # that the tokens lie in on disk
    request_bytes: int = 0  # that one read brings in; at least a stripe
    answer_s: float = 0.0  # from the restored chat to the first token of its answer

    def predict(self, recompute: int, hidden: int) -> Prediction:
        """The first layers recomputed, the next from hidden states, the others from K/V.

        max(compute, I/O) over all stripes, plus fill and drain (see `makespan`).
        """
        kv = self.num_layers - recompute - hidden
        compute = recompute * self.recompute_s + hidden * self.hidden_s + kv * self.kv_s
        num_bytes = self.bytes(recompute, hidden)
        io = num_bytes / self.bytes_per_s
        total = makespan(compute, io, num_bytes, self.stripes, self.request_bytes)
        if num_bytes:
            total += self.latency_s
        return Prediction(total * 1e3, io * 1e3, compute * 1e3)

    def bytes(self, recompute: int, hidden: int) -> int:
        """Bytes that such a plan stores: the input of one hidden layer is at hand anyway."""
        kv = self.num_layers - recompute - hidden
        return max(0, hidden - 1) * self.hidden_bytes + kv * self.kv_bytes

    def plans(self) -> Iterator[tuple[int, int]]:
        """All (recompute, hidden) but those that store hidden states no smaller than K/V."""
        most = self.num_layers if self.hidden_bytes < self.kv_bytes else 1
        for recompute in range(self.num_layers + 1):
            for hidden in range(min(most, self.num_layers - recompute) + 1):
                yield recompute, hidden


def makespan(
    compute_s: float, io_s: float, num_bytes: int, stripes: int, request_bytes: int
) -> float:
    """Seconds of reads that run ahead of the compute on what they bring in.

    The larger of the two sums, plus what overlaps with nothing: the first read when compute is the
    bottleneck, the compute on what the last read brought when reads are.
    """
    if num_bytes == 0:
        return compute_s
    alone = min(1.0, max(request_bytes / num_bytes, 1 / stripes))
    return max(compute_s, io_s) + min(compute_s, io_s) * alone


def fastest(costs: LayerCosts) -> CheckpointPlan:
    """The plan whose restore takes least; of those within 5 % of it, the smallest checkpoint."""
    options = [(costs.predict(r, h).total_ms, costs.bytes(r, h), r, h) for r, h in costs.plans()]
    limit = min(options)[0] * TIE
    _, _, recompute, hidden = min(
        (option for option in options if option[0] <= limit),
        key=lambda option: (option[1], option[0], option[2]),
    )
    return make_plan(costs, recompute, hidden, "the fastest to restore")


def smallest(costs: LayerCosts, target_s: float) -> CheckpointPlan:
    """The smallest checkpoint that gives the first token within `target_s`, else the fastest."""
    options = [(costs.bytes(r, h), costs.predict(r, h).total_ms, r, h) for r, h in costs.plans()]
    limit_ms = (target_s - costs.answer_s) * 1e3
    within = [option for option in options if option[1] <= limit_ms]
    if not within:
        quickest = min(options, key=lambda option: (option[1], option[0], option[2]))
        reason = f"no plan gives the first token within {target_s * 1e3:.0f} ms; the fastest"
        return make_plan(costs, *quickest[2:], reason)
    _, _, recompute, hidden = min(within)
    reason = f"the smallest with the first token within {target_s * 1e3:.0f} ms"
    return make_plan(costs, recompute, hidden, reason)


def make_plan(costs: LayerCosts, recompute: int, hidden: int, reason: str) -> CheckpointPlan:
    """The plan of these numbers of layers, with its predicted times."""
    counts = (recompute, hidden, costs.num_layers - recompute - hidden)
    methods = tuple(m for m, count in zip(METHODS, counts, strict=True) for _ in range(count))
    predicted = costs.predict(recompute, hidden)
    bound = "compute" if predicted.compute_ms > predicted.io_ms else "reads"
    return CheckpointPlan(
        plan_name(methods),
        methods,
        f"{reason}: {predicted.total_ms:.1f} ms predicted, limited by {bound}",
        predicted,
    )


def plan_name(methods: tuple[LayerMethod, ...]) -> str:
    """What a user reads: one method's name, or how many layers have which."""
    counts = {name: methods.count(name) for name in METHODS if name in methods}
    if len(counts) == 1:
        return next(iter(counts))
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def choose_plan(
    method: CheckpointMethod, num_layers: int, hidden_bytes: int, kv_bytes: int
) -> CheckpointPlan:
    """The plan for a server's setting where nothing was measured; every layer has one method.

    `hidden_bytes` and `kv_bytes` are those of one token in one layer, as they are stored. `auto`
    takes whichever is smaller. Hidden states of a model with
    D > 2 d_kv are larger than its K/V and need a projection on top, so they are never chosen
    there (HCache, section 4.1; D model width, d_kv width of K or V).
    """
    if method == "auto":
        ratio = hidden_bytes / kv_bytes
        chosen: LayerMethod = "hidden" if ratio < 1 else "kv"
        reason = f"the disk was not measured; hidden states take {ratio:.2f}x the bytes of K/V"
    else:
        chosen, reason = method, f"asked for by checkpoint_method={method}"
    return CheckpointPlan(chosen, (chosen,) * num_layers, reason)

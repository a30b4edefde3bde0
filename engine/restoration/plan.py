"""Which layers of a checkpoint are stored as hidden states, as K/V, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config import CheckpointMethod

LayerMethod = Literal["hidden", "kv", "recompute"]


@dataclass(frozen=True)
class CheckpointPlan:
    """The method of each layer, and why; `name` is what a user reads."""

    name: str
    methods: tuple[LayerMethod, ...]
    reason: str

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return tuple(i for i, m in enumerate(self.methods) if m == "hidden")

    @property
    def kv_layers(self) -> tuple[int, ...]:
        return tuple(i for i, m in enumerate(self.methods) if m == "kv")

    def bytes_per_token(self, hidden_size: int, kv_size: int, item_bytes: int) -> int:
        """Bytes on disk for one token; `kv_size` is num_kv_heads * head_dim."""
        hidden = len(self.hidden_layers) * hidden_size
        return (hidden + len(self.kv_layers) * 2 * kv_size) * item_bytes


def choose_plan(
    method: CheckpointMethod, num_layers: int, hidden_size: int, kv_size: int
) -> CheckpointPlan:
    """The plan for a server's setting; every layer has the same method.

    `auto` takes whichever of hidden states and K/V is smaller. Hidden states of a model with
    D > 2 d_kv are larger than its K/V and need a projection on top, so they are never chosen
    there (HCache, section 4.1; D model width, d_kv width of K or V).
    """
    if method == "auto":
        ratio = hidden_size / (2 * kv_size)
        chosen: LayerMethod = "hidden" if ratio < 1 else "kv"
        reason = f"hidden states take {ratio:.2f}x the bytes of K/V"
    else:
        chosen, reason = method, f"asked for by checkpoint_method={method}"
    return CheckpointPlan(chosen, (chosen,) * num_layers, reason)

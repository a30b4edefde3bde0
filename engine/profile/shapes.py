"""Shapes of decoders, and what their layers cost where they cannot be measured. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.geometry import ModelConfig
from engine.profile.record import SLICE_TOKENS, ComputeCosts

ROWS = (64, 256, SLICE_TOKENS)


@dataclass(frozen=True)
class Shape:
    """What the costs of a restore depend on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        return cls(
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
        )

    @property
    def kv_size(self) -> int:
        """Width of K or V."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_flops(self) -> float:
        """Of one layer's projections for one token; attention apart (HCache, section 4.1)."""
        query = self.num_heads * self.head_dim
        return 2.0 * self.hidden_size * (2 * query + 2 * self.kv_size + 3 * self.intermediate_size)


SHAPES = {
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536),
    "smollm2-360m": Shape(32, 960, 15, 5, 64, 2560),
    "smollm2-1.7b": Shape(24, 2048, 32, 32, 64, 8192),
    "llama-2-7b": Shape(32, 4096, 32, 32, 128, 11008),
    "llama-2-13b": Shape(40, 5120, 40, 40, 128, 13824),
    "llama-3-8b": Shape(32, 4096, 32, 8, 128, 14336),
    "mistral-7b": Shape(32, 4096, 32, 8, 128, 14336),
    "olmo-2-1b": Shape(16, 2048, 16, 16, 128, 8192),
    "olmo-2-7b": Shape(32, 4096, 32, 32, 128, 11008),
    "olmo-2-13b": Shape(40, 5120, 40, 40, 128, 13824),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18944),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12288),
}


def scaled_costs(measured: ComputeCosts, shape: Shape, item_bytes: int) -> ComputeCosts:
    """Costs of another model on this machine: flops at its GEMM's rate, copies at theirs."""
    pair_s = 4.0 * shape.num_heads * shape.head_dim / measured.pair_flops_per_s
    gemm, kv_size = measured.gemm_flops_per_s, shape.kv_size
    return ComputeCosts(
        rows=ROWS,
        layer_s=tuple(n * shape.layer_flops / gemm + pair_s * n * (n + 1) / 2 for n in ROWS),
        hidden_s=tuple(4.0 * n * shape.hidden_size * kv_size / gemm for n in ROWS),
        kv_s=tuple(2.0 * n * kv_size * item_bytes / measured.copy_bytes_per_s for n in ROWS),
        pair_s=pair_s,
        gemm_flops_per_s=gemm,
        pair_flops_per_s=measured.pair_flops_per_s,
        copy_bytes_per_s=measured.copy_bytes_per_s,
        host_to_device_bytes_per_s=measured.host_to_device_bytes_per_s,
        code_s=measured.code_s,
    )

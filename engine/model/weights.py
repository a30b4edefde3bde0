"""A model's weights, laid out for the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.families import Family
from engine.model.geometry import ModelConfig
from kernels.linear import PackedLinear


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; every projection packed once.

    `attention_norm` and `mlp_norm` are those of the blocks' inputs, or of their outputs in a
    family that normalises after. `q_norm` and `k_norm` are [head_dim] or [width of Q or K].
    """

    attention_norm: Tensor  # [hidden_size]
    qkv: PackedLinear  # rows: Q, then K, then V
    kv: PackedLinear  # rows: K, then V; what restoring from hidden states needs
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    mlp_norm: Tensor  # [hidden_size]
    gate_up: PackedLinear  # rows: gate, then up
    down: PackedLinear


@dataclass(frozen=True)
class Weights:
    """All weights of a model in one dtype. Immutable."""

    config: ModelConfig
    dtype: torch.dtype
    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: PackedLinear
    cos_sin: Tensor  # fp32 [max_positions, head_dim]
    fingerprint: bytes  # of the effective weights and of everything that K/V depend on


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per token of each pair of dimensions, fp32 [head_dim / 2], as transformers rounds."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = scaling.original_max_position_embeddings / (2 * math.pi / plain)
    blend = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def make_layer(get: Callable[[str], Tensor], family: Family, prefix: str) -> LayerWeights:
    """A layer of the tensors that `get` gives by name; prefix: what its tensors' names begin with.

    On a CUDA device the K/V projection is a part of the fused one, no copy.
    """
    attention = prefix + "self_attn."

    def stack(part: str) -> tuple[Tensor, Tensor]:
        """Rows of Q, K and V, and of K and V."""
        q, k, v = (get(f"{attention}{name}_proj.{part}") for name in "qkv")
        fused = torch.cat([q, k, v])
        return fused, fused[len(q) :]

    qkv, kv = stack("weight")
    qkv_bias, kv_bias = stack("bias") if family.qkv_bias else (None, None)
    normed = family.qk_norm != "none"
    if family.norm_after:
        first, second = "post_attention_layernorm", "post_feedforward_layernorm"
    else:
        first, second = "input_layernorm", "post_attention_layernorm"
    gate, up = get(prefix + "mlp.gate_proj.weight"), get(prefix + "mlp.up_proj.weight")
    return LayerWeights(
        attention_norm=get(f"{prefix}{first}.weight"),
        qkv=PackedLinear(qkv, qkv_bias),
        kv=PackedLinear(kv, kv_bias),
        q_norm=get(attention + "q_norm.weight") if normed else None,
        k_norm=get(attention + "k_norm.weight") if normed else None,
        o=PackedLinear(get(attention + "o_proj.weight")),
        mlp_norm=get(f"{prefix}{second}.weight"),
        gate_up=PackedLinear(torch.cat([gate, up])),
        down=PackedLinear(get(prefix + "mlp.down_proj.weight")),
    )

"""A model's weights, laid out for the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model.families import Family
from engine.model.geometry import ModelConfig
from kernels.linear import PackedLinear
from kernels.quantised import QuantisedLinear


class Projection(Protocol):
    """x -> x W^T + b, in whatever form W lies in memory. Immutable."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in], contiguous; returns a new [T, out] in x's dtype, logits maybe in fp32."""


Project = Callable[[Tensor, Tensor | None], Projection]  # of a weight [out, in] and a bias [out]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; every projection laid out once.

    `attention_norm` and `mlp_norm` are those of the blocks' inputs, or of their outputs in a
    family that normalises after. `q_norm` and `k_norm` are [head_dim] or [width of Q or K].
    """

    attention_norm: Tensor  # [hidden_size]
    qkv: Projection  # rows: Q, then K, then V
    kv: Projection  # rows: K, then V; what restoring from hidden states needs
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Projection  # rows: gate, then up
    down: Projection


@dataclass(frozen=True)
class Weights:
    """All weights of a model. Immutable."""

    config: ModelConfig
    dtype: torch.dtype  # of activations and K/V, and of the weights that are not quantised
    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Projection
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


def make_layer(
    get: Callable[[str], Tensor],
    family: Family,
    prefix: str,
    project: Project = PackedLinear,
    get_weight: Callable[[str], Tensor] | None = None,
) -> LayerWeights:
    """A layer of the tensors that `get` gives by name; prefix: what its tensors' names begin with.

    get_weight: where the weights of projections come from, as `project` takes them; None: `get`.
    The K/V projection is a part of the fused one, no copy, where it is quantised or on a CUDA
    device.
    """
    attention = prefix + "self_attn."
    read = get_weight or get

    def stack(part: str, get: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Rows of Q, K and V, and of K and V."""
        q, k, v = (get(f"{attention}{name}_proj.{part}") for name in "qkv")
        fused = torch.cat([q, k, v])
        return fused, fused[len(q) :]

    weight, kv_weight = stack("weight", read)
    bias, kv_bias = stack("bias", get) if family.qkv_bias else (None, None)
    qkv = project(weight, bias)
    if isinstance(qkv, QuantisedLinear):
        kv: Projection = qkv.last_rows(len(kv_weight))
    else:
        kv = project(kv_weight, kv_bias)
    normed = family.qk_norm != "none"
    if family.norm_after:
        first, second = "post_attention_layernorm", "post_feedforward_layernorm"
    else:
        first, second = "input_layernorm", "post_attention_layernorm"
    gate, up = read(prefix + "mlp.gate_proj.weight"), read(prefix + "mlp.up_proj.weight")
    return LayerWeights(
        attention_norm=get(f"{prefix}{first}.weight"),
        qkv=qkv,
        kv=kv,
        q_norm=get(attention + "q_norm.weight") if normed else None,
        k_norm=get(attention + "k_norm.weight") if normed else None,
        o=project(read(attention + "o_proj.weight"), None),
        mlp_norm=get(f"{prefix}{second}.weight"),
        gate_up=project(torch.cat([gate, up]), None),
        down=project(read(prefix + "mlp.down_proj.weight"), None),
    )

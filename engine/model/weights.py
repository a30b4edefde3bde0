"""A model's weights, laid out for the kernels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.model.families import Family
from engine.model.model_config import ModelConfig
from engine.model.weight_files import read_headers
from kernels.kv import rope_table
from kernels.linear import PackedLinear

LAYOUT_VERSION = 1  # of what a checkpoint's bytes mean; a change makes older ones a miss


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


def load_weights(
    model_dir: Path, config: ModelConfig, dtype: torch.dtype, max_positions: int
) -> Weights:
    """Read, convert and pack a model.

    The fingerprint is a digest of the weights' bytes in `dtype`, the RoPE parameters, the norm's
    epsilon and the layout version. Raises ModelError when a weight is not finite.
    """
    tensors = read_headers(model_dir)
    files = {name: path for name, (path, _) in tensors.items()}
    digest = hashlib.blake2b(digest_size=16)
    geometry = (config.family.name, config.num_heads, config.num_kv_heads, config.head_dim)
    rope = (config.rope_theta, config.rope_scaling, config.rms_norm_eps)
    digest.update(repr((LAYOUT_VERSION, str(dtype), geometry, rope)).encode())
    handles = {path: safe_open(path, framework="pt") for path in set(files.values())}

    def get(name: str) -> Tensor:
        # safetensors publishes no types for its compiled reader.
        loaded: Tensor = handles[files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        tensor = loaded.to(dtype).contiguous()
        if not torch.isfinite(tensor).all():
            raise ModelError(f"the model in {model_dir} is damaged: {name} has values not finite")
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
        return tensor

    embedding = get("model.embed_tokens.weight")
    layers = tuple(
        _layer(get, config.family, f"model.layers.{i}.") for i in range(config.num_layers)
    )
    final_norm = get("model.norm.weight")
    head = embedding if config.tie_word_embeddings else get("lm_head.weight")
    return Weights(
        config=config,
        dtype=dtype,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=PackedLinear(head),
        cos_sin=rope_table(inverse_frequencies(config), max_positions),
        fingerprint=digest.digest(),
    )


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


def _layer(get: Callable[[str], Tensor], family: Family, prefix: str) -> LayerWeights:
    attention = prefix + "self_attn."

    def stack(part: str) -> tuple[Tensor, Tensor]:
        """Rows of Q, K and V, and of K and V."""
        q, k, v = (get(f"{attention}{name}_proj.{part}") for name in "qkv")
        return torch.cat([q, k, v]), torch.cat([k, v])

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

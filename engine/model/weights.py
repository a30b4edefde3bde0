"""A model's weights, laid out for the kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.model.source import ModelConfig
from engine.model.weight_files import read_headers
from kernels.kv import rope_table
from kernels.linear import PackedLinear

LAYOUT_VERSION = 1  # of what a checkpoint's bytes mean; a change makes older ones a miss


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; every projection packed once."""

    input_norm: Tensor  # [hidden_size]
    qkv: PackedLinear  # rows: Q, then K, then V
    kv: PackedLinear  # rows: K, then V; what restoring from hidden states needs
    o: PackedLinear
    post_norm: Tensor  # [hidden_size]
    gate_up: PackedLinear  # rows: gate, then up
    down: PackedLinear


@dataclass(frozen=True)
class Weights:
    """All weights of a Llama model in one dtype. Immutable."""

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
    geometry = (config.rope_theta, config.rms_norm_eps, config.num_heads, config.num_kv_heads)
    digest.update(repr((LAYOUT_VERSION, str(dtype), config.head_dim, geometry)).encode())
    handles = {path: safe_open(path, framework="pt") for path in set(files.values())}

    def get(name: str) -> Tensor:
        loaded: Tensor = handles[files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        tensor = loaded.to(dtype).contiguous()
        if not torch.isfinite(tensor).all():
            raise ModelError(f"the model in {model_dir} is damaged: {name} has values not finite")
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
        return tensor

    embedding = get("model.embed_tokens.weight")
    layers = tuple(_layer(get, f"model.layers.{i}.") for i in range(config.num_layers))
    final_norm = get("model.norm.weight")
    head = embedding if config.tie_word_embeddings else get("lm_head.weight")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    return Weights(
        config=config,
        dtype=dtype,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=PackedLinear(head),
        cos_sin=rope_table(inv_freq, max_positions),
        fingerprint=digest.digest(),
    )


def _layer(get: Callable[[str], Tensor], prefix: str) -> LayerWeights:
    attention = prefix + "self_attn."
    q = get(attention + "q_proj.weight")
    kv = torch.cat([get(attention + "k_proj.weight"), get(attention + "v_proj.weight")])
    gate, up = get(prefix + "mlp.gate_proj.weight"), get(prefix + "mlp.up_proj.weight")
    return LayerWeights(
        input_norm=get(prefix + "input_layernorm.weight"),
        qkv=PackedLinear(torch.cat([q, kv])),
        kv=PackedLinear(kv),
        o=PackedLinear(get(attention + "o_proj.weight")),
        post_norm=get(prefix + "post_attention_layernorm.weight"),
        gate_up=PackedLinear(torch.cat([gate, up])),
        down=PackedLinear(get(prefix + "mlp.down_proj.weight")),
    )

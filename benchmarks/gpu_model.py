"""Random weights made where they are used: a step's speed depends on the shape alone."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from engine.model.families import FAMILIES
from engine.model.geometry import ModelConfig, weight_shapes
from engine.model.weights import Weights, inverse_frequencies, make_layer
from kernels.kv import rope_table
from kernels.linear import PackedLinear

LLAMA = FAMILIES[0]


LLAMA_2_7B = ModelConfig(
    family=LLAMA,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=32000,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    max_position_embeddings=1 << 15,  # its own 4,096, and room for the prefixes
    tie_word_embeddings=False,
    eos_token_ids=(2,),
    dtype="bf16",
)
CODELLAMA_13B = replace(
    LLAMA_2_7B,
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=40,
    intermediate_size=13824,
    vocab_size=32016,
    rope_theta=1e6,
)
TINY = replace(
    LLAMA_2_7B,
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=96,
    vocab_size=128,
)


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    std: float = 0.02,
    seed: int = 0,
) -> Weights:
    """Matrices from N(0, std^2), norms' weights between 0.5 and 1.5."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = weight_shapes(config)

    def get(name: str) -> Tensor:
        tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        if "norm" in name:  # ones would hide a norm that is applied twice
            return tensor.uniform_(0.5, 1.5, generator=generator)
        return tensor.normal_(0.0, std, generator=generator)

    names = [f"model.layers.{i}." for i in range(config.num_layers)]
    embedding = get("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else get("lm_head.weight")
    table = rope_table(inverse_frequencies(config), config.max_position_embeddings)
    return Weights(
        config=config,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(make_layer(get, config.family, name) for name in names),
        final_norm=get("model.norm.weight"),
        head=PackedLinear(head),
        cos_sin=table.to(device),
        fingerprint=bytes(16),
    )


def weight_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Of all weights."""
    return sum(prod(shape) for shape in weight_shapes(config).values()) * item_bytes

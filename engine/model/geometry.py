"""The sizes of a decoder, and of the tensors that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.families import Family, Llama3Rope

WeightDType = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The geometry of a decoder, as its directory states it."""

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rope_scaling: Llama3Rope | None = None
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: WeightDType  # of the projections on disk


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this geometry needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    family = config.family
    norms = ["post_attention_layernorm"]
    norms.append("post_feedforward_layernorm" if family.norm_after else "input_layernorm")
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        shapes |= {f"{prefix}{norm}.weight": (hidden,) for norm in norms}
        for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            shapes[f"{attention}{name}_proj.weight"] = (width, hidden)
            if family.qkv_bias:
                shapes[f"{attention}{name}_proj.bias"] = (width,)
            if family.qk_norm != "none" and name != "v":
                normed = config.head_dim if family.qk_norm == "head" else width
                shapes[f"{attention}{name}_norm.weight"] = (normed,)
        shapes |= {
            attention + "o_proj.weight": (hidden, q_width),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes

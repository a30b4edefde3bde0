"""The decoder families that can run, and what sets them apart from Llama.

This module and `geometry` import neither torch nor a package beyond Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ModelError

QKNorm = Literal["none", "head", "width"]


@dataclass(frozen=True)
class Family:
    """What a decoder layer of a family does beyond the common.

    `qk_norm`: Q and K are normalised before RoPE, per head or over their whole width.
    `norm_after`: the residual stream enters a block as it is, and the block's output is normalised
    (OLMo-2), where other families normalise the input.
    """

    name: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: QKNorm = "none"
    norm_after: bool = False


FAMILIES = (
    Family("llama", "LlamaForCausalLM"),
    Family("mistral", "MistralForCausalLM"),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
    Family("qwen3", "Qwen3ForCausalLM", qk_norm="head"),
    Family("olmo2", "Olmo2ForCausalLM", qk_norm="width", norm_after=True),
)


def family_of(architectures: object, model_type: object) -> Family:
    """The family that a config.json names. Raises ModelError for any other."""
    for family in FAMILIES:
        if architectures == [family.architecture] and model_type in (None, family.name):
            return family
    raise ModelError(f"its family is {architectures or model_type!r}")


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency-dependent RoPE scaling as Llama 3.1 introduced it.

    Wavelengths beyond original / low_freq_factor are stretched by `factor`, those below
    original / high_freq_factor are left, and between them the two are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

"""Models with random weights: speed depends on the shape, not on what the weights know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model.families import FAMILIES
from engine.model.model_config import ModelConfig, read_model_config, weight_shapes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
MHA_LAYERS = 4  # of the 24 of SmolLM2-1.7B: the plan of a restore is made a layer at a time
MHA_DECODE_LAYERS = 12  # so that the head weighs about what it does in the whole model


def make_mha_model(parent: Path, tokenizer_dir: Path, *, layers: int = MHA_LAYERS) -> Path:
    """A directory with a random model of SmolLM2-1.7B's shape, with fewer layers.

    Multi-head attention: D = 2048 = d_kv, so hidden states take half the bytes of K/V. The
    tokenizer, and so the vocabulary's size, are those of `tokenizer_dir`.
    """
    model_dir = parent / f"smollm2-1.7b-shape-{layers}-of-24-layers"
    model_dir.mkdir()
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copy(tokenizer_dir / name, model_dir)
    base = json.loads((tokenizer_dir / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 8192,
        "vocab_size": base["vocab_size"],
        "rope_theta": 130000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": base["bos_token_id"],
        "eos_token_id": base["eos_token_id"],
    }
    write_random_model(model_dir, config)
    return model_dir


def write_random_model(model_dir: Path, config: dict[str, object]) -> ModelConfig:
    """Write config.json and bf16 weights drawn from N(0, 0.02^2), norms one."""
    (model_dir / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(
        ModelConfig(
            family=FAMILIES[0],
            num_layers=_int(config, "num_hidden_layers"),
            hidden_size=_int(config, "hidden_size"),
            num_heads=_int(config, "num_attention_heads"),
            num_kv_heads=_int(config, "num_key_value_heads"),
            head_dim=_int(config, "hidden_size") // _int(config, "num_attention_heads"),
            intermediate_size=_int(config, "intermediate_size"),
            vocab_size=_int(config, "vocab_size"),
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            max_position_embeddings=_int(config, "max_position_embeddings"),
            tie_word_embeddings=bool(config["tie_word_embeddings"]),
            eos_token_ids=(),
            dtype="bf16",
        )
    )
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            values = torch.empty(shape, dtype=torch.bfloat16)
            tensors[name] = values.normal_(0.0, 0.02, generator=generator)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    return read_model_config(model_dir)


def _int(config: dict[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value

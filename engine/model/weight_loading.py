"""From a model directory to weights in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.model.geometry import ModelConfig
from engine.model.rotation import KEY as ROTATION_KEY
from engine.model.rotation import GetTensor, rotated, rotated_config
from engine.model.weight_files import read_headers
from engine.model.weights import Weights, inverse_frequencies, make_layer
from kernels.kv import rope_table
from kernels.linear import PackedLinear

LAYOUT_VERSION = 1  # of what a checkpoint's bytes mean; a change makes older ones a miss


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    max_positions: int,
    device: torch.device | str = "cpu",
    *,
    rotate: bool = False,
) -> Weights:
    """Read, convert and pack a model; with `rotate` in the basis of `engine.model.rotation`.

    The fingerprint is a digest of the weights' bytes in `dtype`, the RoPE parameters, the norm's
    epsilon and the layout version. Raises ModelError when a weight is not finite, and when the
    model is to be rotated and its family cannot be.
    """
    tensors = read_headers(model_dir)
    files = {name: path for name, (path, _) in tensors.items()}
    digest = hashlib.blake2b(digest_size=16)
    geometry = (config.family.name, config.num_heads, config.num_kv_heads, config.head_dim)
    rope = (config.rope_theta, config.rope_scaling, config.rms_norm_eps)
    digest.update(repr((LAYOUT_VERSION, str(dtype), geometry, rope)).encode())
    handles = {path: safe_open(path, framework="pt") for path in set(files.values())}

    def read(name: str) -> Tensor:
        # safetensors publishes no types for its compiled reader.
        loaded: Tensor = handles[files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        return loaded

    source: GetTensor = read
    if rotate:
        source = rotated(read, config)
        config = rotated_config(config)
        digest.update(ROTATION_KEY.encode())

    def get(name: str) -> Tensor:
        tensor = source(name).to(dtype).contiguous()
        if not torch.isfinite(tensor).all():
            raise ModelError(f"the model in {model_dir} is damaged: {name} has values not finite")
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
        return tensor.to(device)

    embedding = get("model.embed_tokens.weight")
    layers = tuple(
        make_layer(get, config.family, f"model.layers.{i}.") for i in range(config.num_layers)
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
        cos_sin=rope_table(inverse_frequencies(config), max_positions).to(device),
        fingerprint=digest.digest(),
    )

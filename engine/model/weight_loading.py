"""From a model directory to weights in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.model.geometry import ModelConfig
from engine.model.quantising import Quantiser
from engine.model.rotation import KEY as ROTATION_KEY
from engine.model.rotation import GetTensor, rotated, rotated_config
from engine.model.weight_files import read_headers
from engine.model.weights import Weights, inverse_frequencies, make_layer
from engine.profile.weight_figures import WeightFormat
from kernels.kv import rope_table
from kernels.linear import PackedLinear

LAYOUT_VERSION = 1  # of what a checkpoint's bytes mean; a change makes older ones a miss
QUANTISED_KEY = "inputs in 8 bits, 32 to a scale"  # what K/V depend on beside quantised weights


def open_tensors(model_dir: Path, config: ModelConfig, *, rotate: bool = False) -> GetTensor:
    """A model's tensors by name, as stored or in the rotated basis, which is fp32; each is read
    when it is asked for.

    Raises ModelError when there is no such model; asking raises it for a tensor with a value that
    is not finite.
    """
    tensors = read_headers(model_dir)
    files = {name: path for name, (path, _) in tensors.items()}
    handles = {path: safe_open(path, framework="pt") for path in set(files.values())}
    looked_at: set[str] = set()

    def read(name: str) -> Tensor:
        # safetensors publishes no types for its compiled reader.
        tensor: Tensor = handles[files[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        if name not in looked_at and not _is_finite(tensor):
            raise ModelError(f"the model in {model_dir} is damaged: {name} has values not finite")
        looked_at.add(name)
        return tensor

    return rotated(read, config) if rotate else read


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are; by the extremes, which are found 20 times as fast."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    max_positions: int,
    device: torch.device | str = "cpu",
    *,
    rotate: bool = False,
    format: WeightFormat | None = None,
) -> Weights:
    """Read, convert and lay out a model; with `rotate` in the basis of `engine.model.rotation`.

    format: of projections and head; None: `dtype`, the only one but int8 and int4. The fingerprint
    is a digest of the weights' bytes as they lie in memory, the RoPE parameters, the norm's epsilon
    and the layout version. Raises ModelError when a weight is not finite, when the model is to be
    rotated and its family cannot be, and for int4 when no projection lies on a 4-bit grid.
    """
    digest = hashlib.blake2b(digest_size=16)
    geometry = (config.family.name, config.num_heads, config.num_kv_heads, config.head_dim)
    rope = (config.rope_theta, config.rope_scaling, config.rms_norm_eps)
    digest.update(repr((LAYOUT_VERSION, str(dtype), geometry, rope)).encode())
    source = open_tensors(model_dir, config, rotate=rotate)
    if rotate:
        config = rotated_config(config)
        digest.update(ROTATION_KEY.encode())

    def tell(data: Tensor) -> None:
        digest.update(data.numpy().data)

    def get(name: str) -> Tensor:
        tensor = source(name).to(dtype).contiguous()
        digest.update(name.encode())
        tell(tensor.view(torch.uint8))
        return tensor.to(device)

    def get_fp32(name: str) -> Tensor:
        digest.update(name.encode())
        return source(name).float().contiguous()

    embedding = get("model.embed_tokens.weight")
    names = [f"model.layers.{i}." for i in range(config.num_layers)]
    head_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    if format == "int8" or format == "int4":
        digest.update(QUANTISED_KEY.encode())
        quantiser = Quantiser(format, dtype, tell)
        project = quantiser.project
        layers = tuple(make_layer(get, config.family, name, project, get_fp32) for name in names)
        if format == "int4" and not quantiser.on_grid:
            raise ModelError(
                f"the weights in {model_dir} were not rounded to 4 bits by whoever made the file, "
                "and rounding them now would cost too much: int8 is possible"
            )
        head = quantiser.head(get_fp32(head_name))
    else:
        layers = tuple(make_layer(get, config.family, name) for name in names)
        head = PackedLinear(embedding if config.tie_word_embeddings else get(head_name))
    final_norm = get("model.norm.weight")
    return Weights(
        config=config,
        dtype=dtype,
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=head,
        cos_sin=rope_table(inverse_frequencies(config), max_positions).to(device),
        fingerprint=digest.digest(),
    )

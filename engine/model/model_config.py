"""The geometry of a model directory, refused unless all of it can run. Torch-free."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.errors import ModelError
from engine.model.families import FAMILIES, Llama3Rope, family_of
from engine.model.geometry import ModelConfig as ModelConfig
from engine.model.geometry import WeightDType
from engine.model.geometry import weight_shapes as weight_shapes
from engine.model.weight_files import read_headers

SUPPORTED = (
    f"supported are {', '.join(family.architecture for family in FAMILIES)}, without sliding "
    "windows or quantisation, with plain or Llama 3 RoPE, and with fp32, fp16 or bf16 weights in "
    "safetensors files"
)
_DTYPES: dict[str, WeightDType] = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class _HFConfig(msgspec.Struct, kw_only=True):
    """The fields of a config.json that matter here, with Llama's defaults."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    partial_rotary_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool | None = None  # None: a window that is set is used
    layer_types: list[str] | None = None
    hidden_act: str = "silu"
    eos_token_id: int | list[int] | None = None


def read_model_config(model_dir: Path) -> ModelConfig:
    """Geometry of the model in a directory whose weights were checked to be all there.

    Reads headers only: names, shapes and file sizes. Raises ModelError, naming the directory, the
    fault and what is supported.
    """
    try:
        config = _geometry(model_dir)
        return _with_weights(model_dir, config)
    except ModelError as error:
        message = f"the model in {model_dir} cannot be used: {error}; {SUPPORTED}"
        raise ModelError(message) from error


def _geometry(model_dir: Path) -> ModelConfig:
    """What config.json says, refused unless all of it is supported; dtype is not known yet."""
    raw, fields = _read_json(model_dir / "config.json")
    family = family_of(fields.get("architectures"), fields.get("model_type"))
    if fields.get("quantization_config") or fields.get("compression_config"):
        raise ModelError("its weights are quantised")
    try:
        hf = msgspec.json.decode(raw, type=_HFConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"its config.json is damaged: {error}") from None
    if hf.attention_bias or hf.mlp_bias:
        raise ModelError("its projections have biases that its family does not have")
    windows = {kind for kind in hf.layer_types or () if kind != "full_attention"}
    if windows or (hf.sliding_window is not None and hf.use_sliding_window is not False):
        what = ", ".join(sorted(windows)) or f"a sliding window of {hf.sliding_window} tokens"
        raise ModelError(f"its layers attend with {what}")
    if hf.hidden_act != "silu":
        raise ModelError(f"its activation is {hf.hidden_act!r}, not 'silu'")
    num_kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    head_dim = hf.head_dim or hf.hidden_size // max(1, hf.num_attention_heads)
    sizes = [hf.num_hidden_layers, hf.hidden_size, hf.num_attention_heads, num_kv_heads, head_dim]
    sizes += [hf.intermediate_size, hf.vocab_size, hf.max_position_embeddings]
    if min(sizes) < 1 or hf.num_attention_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"its sizes do not fit together: {hf.num_attention_heads} heads, {num_kv_heads} key "
            f"and value heads of {head_dim}, {hf.num_hidden_layers} layers of {hf.hidden_size}"
        )
    theta, scaling = _rope(hf)
    return ModelConfig(
        family=family,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=hf.rms_norm_eps,
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        eos_token_ids=_eos_token_ids(model_dir, hf),
        dtype="fp32",
    )


def _read_json(path: Path) -> tuple[bytes, dict[str, object]]:
    try:
        raw = path.read_bytes()
        fields = json.loads(raw)
    except OSError as error:
        raise ModelError(f"its {path.name} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ModelError(f"its {path.name} is damaged: {error}") from None
    if not isinstance(fields, dict):
        raise ModelError(f"its {path.name} is damaged: it holds no object")
    return raw, fields


def _rope(hf: _HFConfig) -> tuple[float, Llama3Rope | None]:
    """Base and scaling of RoPE. Raises ModelError for a kind that is not known."""
    theta: object = hf.rope_theta
    partial: object = hf.partial_rotary_factor
    scaling: Llama3Rope | None = None
    for parameters in (hf.rope_scaling, hf.rope_parameters):
        if parameters is None:
            continue
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "llama3":
            try:
                scaling = msgspec.convert(parameters, Llama3Rope)
            except msgspec.ValidationError as error:
                raise ModelError(f"its RoPE scaling is damaged: {error}") from None
        elif kind != "default":
            raise ModelError(f"it uses RoPE scaling of type {kind!r}")
        theta = parameters.get("rope_theta", theta)
        partial = parameters.get("partial_rotary_factor", partial)
    if partial not in (1.0, None):
        raise ModelError(f"it rotates only {partial!r} of each head")
    theta = 10000.0 if theta is None else theta
    if not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"its rope_theta is {theta!r}")
    return float(theta), scaling


def _eos_token_ids(model_dir: Path, hf: _HFConfig) -> tuple[int, ...]:
    """Every id that ends a turn, from generation_config.json and config.json."""
    values: list[object] = [hf.eos_token_id]
    if (model_dir / "generation_config.json").is_file():
        values.append(_read_json(model_dir / "generation_config.json")[1].get("eos_token_id"))
    ids: set[int] = set()
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                ids.add(token_id)
    if not ids:
        raise ModelError("it names no end-of-turn token (eos_token_id)")
    if not all(0 <= token_id < hf.vocab_size for token_id in ids):
        raise ModelError(f"its end-of-turn tokens {sorted(ids)} are not all in the vocabulary")
    return tuple(sorted(ids))


def _with_weights(model_dir: Path, config: ModelConfig) -> ModelConfig:
    """The config with the weights' dtype, after a check that each tensor is there."""
    tensors = read_headers(model_dir)
    for name, shape in weight_shapes(config).items():
        if name not in tensors:
            raise ModelError(f"its weights lack {name}")
        _, tensor = tensors[name]
        if tensor.shape != shape:
            raise ModelError(
                f"{name} has shape {list(tensor.shape)}, its config.json says {list(shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"{name} has elements of type {tensor.dtype}")
    _, projection = tensors["model.layers.0.mlp.down_proj.weight"]
    return replace(config, dtype=_DTYPES[projection.dtype])

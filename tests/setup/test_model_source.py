"""Model directories are checked before anything is loaded; every refusal says why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

from engine.errors import ModelError
from engine.model.families import Family
from engine.model.model_config import ModelConfig, read_model_config, weight_shapes
from engine.model.source import EMBEDDED_NAME, resolve_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 3,
}


def geometry(**changes: Any) -> ModelConfig:
    """What `CONFIG` means, written down by hand."""
    fields: dict[str, Any] = {
        "family": Family("llama", "LlamaForCausalLM"),
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "vocab_size": 32,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_ids": (3,),
        "dtype": "fp32",
    }
    return ModelConfig(**(fields | changes))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    target = tmp_path / "tiny"
    target.mkdir()
    (target / "tokenizer.json").write_text("{}")
    write_config(target, {})
    write_weights(target)
    return target


def write_config(target: Path, changes: dict[str, Any]) -> None:
    fields = {k: v for k, v in (CONFIG | changes).items() if v is not ...}
    (target / "config.json").write_text(json.dumps(fields))


def write_weights(target: Path, dtype: Any = np.float32) -> None:
    tensors = {n: np.ones(shape, dtype) for n, shape in weight_shapes(geometry()).items()}
    save_file(tensors, target / "model.safetensors")


def refusal(model_dir: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_model_config(model_dir)
    message = str(caught.value)
    assert message.startswith(f"the model in {model_dir} cannot be used: ")
    assert "; supported are LlamaForCausalLM, MistralForCausalLM, " in message
    return message


def test_a_whole_directory_is_read(model_dir: Path) -> None:
    assert read_model_config(model_dir) == geometry()


def test_fp16_weights_are_told_apart(model_dir: Path) -> None:
    write_weights(model_dir, np.float16)
    assert read_model_config(model_dir).dtype == "fp16"


def test_newer_config_files_nest_rope_theta(model_dir: Path) -> None:
    nested = {"rope_theta": ..., "rope_parameters": {"rope_theta": 7.5, "rope_type": "default"}}
    write_config(model_dir, nested)
    assert read_model_config(model_dir) == geometry(rope_theta=7.5)


def test_turns_end_at_the_tokens_of_both_files(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert read_model_config(model_dir).eos_token_ids == (3, 9)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt"}, "its family is ['OPTFor"),
        ({"architectures": ["MistralForCausalLM"]}, "its family is ['Mistral"),  # not the type
        ({"sliding_window": 64}, "its layers attend with a sliding window of 64 tokens"),
        ({"layer_types": ["full_attention", "chunked"]}, "its layers attend with chunked"),
        ({"architectures": ..., "model_type": "bert"}, "its family is 'bert'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantised"),
        ({"attention_bias": True}, "its projections have biases"),
        ({"mlp_bias": True}, "its projections have biases"),
        ({"hidden_act": "gelu"}, "its activation is 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE scaling is damaged"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling of type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "RoPE scaling of type 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "it rotates only 0.5 of each head"),
        ({"rope_theta": -1.0}, "its rope_theta is -1.0"),
        ({"num_hidden_layers": "two"}, "Expected `int`, got `str` - at `$.num_hidden_layers`"),
        ({"hidden_size": ...}, "missing required field `hidden_size`"),
        ({"num_key_value_heads": 3}, "its sizes do not fit together: 4 heads, 3 key"),
        ({"num_attention_heads": 0}, "its sizes do not fit together"),
        ({"eos_token_id": None}, "it names no end-of-turn token"),
        ({"eos_token_id": 32}, "its end-of-turn tokens [32] are not all in the vocabulary"),
        ({"num_hidden_layers": 3}, "its weights lack model.layers.2."),
        ({"tie_word_embeddings": False}, "its weights lack lm_head.weight"),
        ({"intermediate_size": 48}, "has shape [24, 16], its config.json says [48, 16]"),
    ],
)
def test_unsupported_models_are_refused(
    model_dir: Path, changes: dict[str, Any], fault: str
) -> None:
    write_config(model_dir, changes)
    assert fault in refusal(model_dir)


@pytest.mark.parametrize("content", ["{", "[]", "\x00", '{"architectures": "x"'])
def test_a_damaged_config_is_refused(model_dir: Path, content: str) -> None:
    (model_dir / "config.json").write_text(content)
    assert "its config.json is damaged" in refusal(model_dir)


def test_a_missing_config_is_refused(model_dir: Path) -> None:
    (model_dir / "config.json").unlink()
    assert "its config.json cannot be read (No such file or directory)" in refusal(model_dir)


def test_missing_weights_are_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / "pytorch_model.bin").write_bytes(b"pickle")
    assert "it has no weights (model.safetensors" in refusal(model_dir)


def _cut_to(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


@pytest.mark.parametrize(
    "damage",
    [
        _cut_to(0),
        _cut_to(5),
        _cut_to(100),
        _cut_to(-1),
        lambda content: content + b"\0",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"[" + content[9:],
        lambda content: content.replace(b"[16]", b"[17]", 1),
        lambda _: b"version 1 of a pointer to a large file",
    ],
)
def test_damaged_weights_are_refused(model_dir: Path, damage: Callable[[bytes], bytes]) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(model_dir)
    assert "model.safetensors is truncated or corrupt" in message or "is corrupt" in message


def test_other_element_types_are_refused(model_dir: Path) -> None:
    write_weights(model_dir, np.int8)
    assert "has elements of type I8" in refusal(model_dir)


def _shard(model_dir: Path) -> dict[str, str]:
    shapes = weight_shapes(geometry())
    weight_map = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(shapes)}
    for shard in set(weight_map.values()):
        names = [name for name, file in weight_map.items() if file == shard]
        save_file({n: np.ones(shapes[n], np.float32) for n in names}, model_dir / shard)
    (model_dir / "model.safetensors").unlink()
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_sharded_weights_are_read(model_dir: Path) -> None:
    _shard(model_dir)
    assert read_model_config(model_dir) == geometry()


def test_a_missing_or_torn_shard_is_refused(model_dir: Path) -> None:
    _shard(model_dir)
    shard = model_dir / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert "model-2.safetensors is truncated or corrupt" in refusal(model_dir)
    shard.unlink()
    assert "model-2.safetensors cannot be read: No such file" in refusal(model_dir)


def test_an_index_cannot_lead_outside_or_lie(model_dir: Path) -> None:
    weight_map = _shard(model_dir)
    index = model_dir / "model.safetensors.index.json"
    swapped = dict(zip(weight_map, reversed(list(weight_map.values())), strict=True))
    index.write_text(json.dumps({"weight_map": swapped}))
    assert "which model.safetensors.index.json places there" in refusal(model_dir)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../x.safetensors"}}))
    assert "names '../x.safetensors', not a plain file" in refusal(model_dir)
    index.write_text("{")
    assert "model.safetensors.index.json is damaged" in refusal(model_dir)


def test_a_directory_is_taken_as_it_is(model_dir: Path, tmp_path: Path) -> None:
    assert resolve_model(str(model_dir), tmp_path, print) == model_dir
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"it has no tokenizer\.json"):
        resolve_model(str(model_dir), tmp_path, print)


@pytest.mark.parametrize("spec", ["./absent", "/absent/model", "no-owner", "a/b/c", "../x/y", ""])
def test_a_name_that_is_nothing_is_refused(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model|cannot be used"):
        resolve_model(spec, tmp_path, print)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelError, match=r"x\.gguf is a file"):
        resolve_model(str(tmp_path / "x.gguf"), tmp_path, print)


def test_a_hub_model_is_downloaded_once(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Path]] = []

    def download(repo_id: str, *, local_dir: Path, allow_patterns: list[str]) -> str:
        calls.append((repo_id, local_dir))
        local_dir.parent.mkdir(parents=True)
        model_dir.rename(local_dir)
        assert "*.safetensors" in allow_patterns
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    target = tmp_path / "data" / "models" / "hub" / "some--tiny-model"
    for _ in range(2):
        assert resolve_model("some/tiny-model", tmp_path / "data", print) == target
    assert calls == [("some/tiny-model", target)]
    assert read_model_config(target) == geometry()


@pytest.mark.parametrize(
    "error",
    [
        httpx2.ConnectError("name or service not known"),
        errors.LocalEntryNotFoundError("name or service not known"),
        OSError("name or service not known"),
    ],
)
def test_offline_the_hub_is_a_clear_refusal(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError) as caught:
        resolve_model("some/tiny-model", tmp_path, print)
    assert "'some/tiny-model' is no directory here and could not be downloaded" in str(caught.value)
    assert "name or service not known" in str(caught.value)


def test_a_damaged_embedded_model_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "models" / EMBEDDED_NAME
    with pytest.raises(ModelError, match=r"the embedded model is missing in .*run `make setup`"):
        resolve_model("embedded", tmp_path, print)
    target.mkdir(parents=True)
    digests = target / "digests.json"
    digests.write_text("{")
    with pytest.raises(ModelError, match=r"digests\.json is damaged"):
        resolve_model("embedded", tmp_path, print)
    digests.write_text('{"source": "00", "files": {}}')
    with pytest.raises(ModelError, match="made from another file"):
        resolve_model("embedded", tmp_path, print)


def test_one_flipped_bit_of_the_embedded_model_is_noticed(
    embedded_model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "models" / EMBEDDED_NAME
    copy.mkdir(parents=True)
    for path in embedded_model.iterdir():
        (copy / path.name).symlink_to(path.resolve())
    assert resolve_model("embedded", tmp_path, print) == copy
    content = bytearray((copy / "tokenizer.json").read_bytes())
    content[1000] ^= 1
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"the embedded model is damaged: .*tokenizer\.json"):
        resolve_model("embedded", tmp_path, print)


def test_reading_a_source_needs_no_torch() -> None:
    import subprocess

    program = "import sys, engine.model.source, app.settings; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert result.stdout.strip() == b"False"

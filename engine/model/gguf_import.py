"""Turns the embedded GGUF file into a Hugging Face style directory. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import ModelError
from engine.model.weight_files import SINGLE_FILE, write_fp32

T = TypeVar("T")
DIGESTS_FILE = "digests.json"
_CONTROL_TOKEN = 3  # GGUF's token type of tokens that never come from text
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def import_gguf(gguf_path: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Write config, tokenizer and fp32 weights of a Llama GGUF file to the directory `target`.

    The directory appears complete or not at all, and replaces one that was there; its digests
    file holds the SHA-256 of the source and of each file. `progress` gets a line now and then.
    Raises ModelError when the file is damaged or not of the one kind that is supported.
    """
    progress(f"reading {gguf_path.name}")
    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{gguf_path} is not a usable GGUF file: {error}") from error
    metadata = _Metadata(reader, gguf_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    partial.chmod(0o755)
    try:
        _write_json(partial / "config.json", _model_config(reader, metadata))
        _write_json(partial / "generation_config.json", _generation_config(metadata))
        progress("writing the tokenizer")
        _build_tokenizer(metadata).save(str(partial / "tokenizer.json"))
        _write_json(partial / "tokenizer_config.json", _tokenizer_config(metadata))
        _write_weights(partial / SINGLE_FILE, reader, metadata, progress)
        progress("computing digests")
        files = {path.name: sha256_of(path) for path in sorted(partial.iterdir())}
        source = sha256_of(gguf_path)
        _write_json(partial / DIGESTS_FILE, {"source": source, "files": files})
        _publish(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress(f"the model is in {target}")


class _Metadata:
    """Typed access to a GGUF file's key-value pairs, and the refusal of unsupported files."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._reader = reader
        self._path = path
        supported = {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
        }
        for key, value in supported.items():
            found = self.get(key, str)
            if found != value:
                raise ModelError(f"{path}: {key} is {found!r}; only {value!r} can be imported")
        for key in reader.fields:
            if key.startswith("llama.rope.scaling"):
                raise ModelError(f"{path}: {key} is set; RoPE scaling is not supported")

    def get(self, key: str, kind: type[T]) -> T:
        """The value of a key. Raises ModelError when it is absent or of another type."""
        field = self._reader.get_field(key)
        value = None if field is None else field.contents()
        if not isinstance(value, kind):
            raise ModelError(f"{self._path}: the key {key} is missing or no {kind.__name__}")
        return value

    @property
    def tokens(self) -> list[str]:
        return self.get("tokenizer.ggml.tokens", list)

    def token(self, role: str) -> tuple[int, str]:
        """Id and text of a special token ("bos", "eos", "unknown", "padding")."""
        token_id = self.get(f"tokenizer.ggml.{role}_token_id", int)
        return token_id, self.tokens[token_id]


def _model_config(reader: GGUFReader, metadata: _Metadata) -> dict[str, Any]:
    hidden = metadata.get("llama.embedding_length", int)
    heads = metadata.get("llama.attention.head_count", int)
    # GGUF stores floats as fp32: the shortest decimal that gives the same fp32 is what was meant.
    rms_norm_eps = float(
        str(np.float32(metadata.get("llama.attention.layer_norm_rms_epsilon", float)))
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata.token("bos")[0],
        "eos_token_id": metadata.token("eos")[0],
        "pad_token_id": metadata.token("padding")[0],
        "head_dim": metadata.get("llama.rope.dimension_count", int),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": round(hidden**-0.5, 6),
        "intermediate_size": metadata.get("llama.feed_forward_length", int),
        "max_position_embeddings": metadata.get("llama.context_length", int),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata.get("llama.block_count", int),
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", int),
        "pretraining_tp": 1,
        "rms_norm_eps": rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": float(metadata.get("llama.rope.freq_base", float)),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": metadata.get("llama.vocab_size", int),
    }


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    return {
        "bos_token_id": metadata.token("bos")[0],
        "eos_token_id": metadata.token("eos")[0],
        "pad_token_id": metadata.token("padding")[0],
    }


def _build_tokenizer(metadata: _Metadata) -> Tokenizer:
    tokens = metadata.tokens
    kinds = metadata.get("tokenizer.ggml.token_type", list)
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", list)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": metadata.token("bos")[1],
        "chat_template": metadata.get("tokenizer.chat_template", str),
        "clean_up_tokenization_spaces": False,
        "eos_token": metadata.token("eos")[1],
        "model_max_length": metadata.get("llama.context_length", int),
        "pad_token": metadata.token("padding")[1],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": metadata.token("unknown")[1],
    }


def _write_weights(
    path: Path, reader: GGUFReader, metadata: _Metadata, progress: Callable[[str], None]
) -> None:
    heads = {
        "attn_q": metadata.get("llama.attention.head_count", int),
        "attn_k": metadata.get("llama.attention.head_count_kv", int),
    }
    layout = [
        (_target_name(tensor.name), tuple(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    ]

    def dequantized() -> Iterator[npt.NDArray[np.float32]]:
        total = len(reader.tensors)
        for done, tensor in enumerate(reader.tensors):
            if done % 64 == 0:
                progress(f"dequantising the weights: {done} of {total} tensors")
            weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            kind = tensor.name.split(".")[-2]
            yield unpermute_rope(weight, heads[kind]) if kind in heads else weight

    write_fp32(path, layout, dequantized())


def _target_name(name: str) -> str:
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name]
    block, layer, kind, suffix = ([*name.split("."), "", "", "", ""])[:4]
    if block != "blk" or kind not in _LAYER_TENSORS or suffix != "weight":
        raise ModelError(f"the GGUF file has a tensor {name!r}, which a plain Llama model lacks")
    return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"


def unpermute_rope(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a Q or K projection [num_heads * head_dim, hidden] in Hugging Face's order.

    llama.cpp's converter interleaves the two halves of each head, so that RoPE rotates
    neighbouring rows; Hugging Face's RoPE rotates row i with row i + head_dim / 2.
    """
    interleaved = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return interleaved.swapaxes(1, 2).reshape(weight.shape)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _publish(partial: Path, target: Path) -> None:
    """Put a finished directory in place, contents durable before the name."""
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists():
        replaced = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        target.rename(replaced / target.name)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

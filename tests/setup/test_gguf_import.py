"""The GGUF import: tensors against values written by hand, text against what the model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import ModelError
from engine.model.gguf_import import import_gguf, sha256_of
from engine.model.model_config import read_model_config

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2
TOKENS = ["<|end|>", "<|turn|>", "a", "b", "ab", "Ġ", "Ġa", "1", "2"]
# Written by people for this test; any fluent English would do.
ENGLISH = (
    "The library opens at nine in the morning and closes at six in the evening. Visitors may "
    "borrow up to five books at a time, and most of them may be kept for three weeks. If nobody "
    "else is waiting for a book, it can be renewed once. Children are welcome in the reading room "
    "on the first floor, where stories are read aloud every Saturday afternoon."
)


class TinyGGUF:
    """A GGUF file as llama.cpp's converter would write it, with the values that it stands for."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.path = path
        self.expected: dict[str, npt.NDArray[np.float32]] = {}
        self._random = np.random.default_rng(7)
        self._writer = gguf.GGUFWriter(path, changes.get("arch", "llama"))
        self._metadata(changes)
        self._tensors(changes)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def _metadata(self, changes: dict[str, Any]) -> None:
        writer = self._writer
        writer.add_block_count(LAYERS)
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(20000.0)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(len(TOKENS))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(changes.get("pre", "smollm"))
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
        writer.add_token_merges(["a b", "Ġ a"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(0)
        writer.add_chat_template("{{ messages }}")
        if "scaling" in changes:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)

    def _tensors(self, changes: dict[str, Any]) -> None:
        q8 = gguf.GGMLQuantizationType.Q8_0
        self._add("token_embd", "model.embed_tokens", (len(TOKENS), HIDDEN), kind=q8)
        self._add("output_norm", "model.norm", (HIDDEN,), kind=None)
        for layer in range(LAYERS):
            for name, target, shape, heads in (
                ("attn_q", "self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN), HEADS),
                ("attn_k", "self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS),
                ("attn_v", "self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN), 0),
                ("attn_output", "self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM), 0),
                ("ffn_gate", "mlp.gate_proj", (INNER, HIDDEN), 0),
                ("ffn_up", "mlp.up_proj", (INNER, HIDDEN), 0),
                ("ffn_down", "mlp.down_proj", (HIDDEN, INNER), 0),
            ):
                self._add(f"blk.{layer}.{name}", f"model.layers.{layer}.{target}", shape, heads)
            for name in ("attn_norm", "ffn_norm"):
                target = "input_layernorm" if name == "attn_norm" else "post_attention_layernorm"
                source = f"blk.{layer}.{name}"
                self._add(source, f"model.layers.{layer}.{target}", (HIDDEN,), kind=None)
        if "extra" in changes:
            self._add(changes["extra"], "extra", (HIDDEN,), kind=None)

    def _add(
        self,
        name: str,
        target: str,
        shape: tuple[int, ...],
        heads: int = 0,
        kind: gguf.GGMLQuantizationType | None = gguf.GGMLQuantizationType.Q4_1,
    ) -> None:
        weight = self._random.standard_normal(shape).astype(np.float32)
        if kind is None:
            self._writer.add_tensor(f"{name}.weight", weight)
            self.expected[f"{target}.weight"] = weight
            return
        raw = gguf.quants.quantize(weight, kind)
        values = by_hand_q4_1(raw) if kind is gguf.GGMLQuantizationType.Q4_1 else by_hand_q8_0(raw)
        self.expected[f"{target}.weight"] = values
        stored = raw
        if heads:  # llama.cpp's `permute`, row by row: the two halves of a head are interleaved
            half = HEAD_DIM // 2
            order = [h * HEAD_DIM + i // 2 + (i % 2) * half for h in range(heads)
                     for i in range(HEAD_DIM)]  # fmt: skip
            stored = raw[order]
        self._writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)


def by_hand_q4_1(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Blocks of 32: fp16 d, fp16 m, then 16 bytes with element i low and element i + 16 high."""
    rows = []
    for row in raw:
        values: list[np.float32] = []
        for start in range(0, len(row), 20):
            d, m = row[start : start + 4].view(np.float16).astype(np.float32)
            nibbles = row[start + 4 : start + 20]
            quants = [int(b) & 15 for b in nibbles] + [int(b) >> 4 for b in nibbles]
            values += [d * np.float32(q) + m for q in quants]
        rows.append(values)
    return np.array(rows, np.float32)


def by_hand_q8_0(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Blocks of 32: fp16 d, then 32 signed bytes."""
    blocks = raw.reshape(raw.shape[0], -1, 34)
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    values = d * np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32)
    return values.reshape(raw.shape[0], -1)


def test_every_tensor_is_what_the_file_stands_for(tmp_path: Path) -> None:
    source = TinyGGUF(tmp_path / "tiny.gguf")
    lines: list[str] = []
    import_gguf(source.path, tmp_path / "model", lines.append)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == source.expected.keys()
    for name, expected in source.expected.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    assert any("dequantising the weights" in line for line in lines)


def test_config_and_tokenizer_of_an_import(tmp_path: Path) -> None:
    source = TinyGGUF(tmp_path / "tiny.gguf")
    import_gguf(source.path, tmp_path / "model", print)
    config = read_model_config(tmp_path / "model")
    assert (config.num_layers, config.hidden_size, config.num_heads) == (LAYERS, HIDDEN, HEADS)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (KV_HEADS, HEAD_DIM, 2e4)
    assert (config.rms_norm_eps, config.eos_token_ids, config.tie_word_embeddings) == (
        1e-5,
        (0,),
        True,
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("ab a12<|turn|>").ids == [4, 6, 7, 8, 1]
    assert tokenizer.decode([4, 6, 7, 8]) == "ab a12"
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert (settings["bos_token"], settings["eos_token"]) == ("<|turn|>", "<|end|>")


def test_digests_cover_every_file_and_the_source(tmp_path: Path) -> None:
    source = TinyGGUF(tmp_path / "tiny.gguf")
    target = tmp_path / "model"
    import_gguf(source.path, target, print)
    digests = json.loads((target / "digests.json").read_text())
    assert digests["source"] == sha256_of(source.path)
    names = {path.name for path in target.iterdir()} - {"digests.json"}
    assert digests["files"] == {name: sha256_of(target / name) for name in names}


def test_an_import_replaces_a_damaged_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    source = TinyGGUF(tmp_path / "tiny.gguf")
    target = tmp_path / "models" / "tiny"
    target.mkdir(parents=True)
    (target / "leftover").touch()
    import_gguf(source.path, target, print)
    assert not (target / "leftover").exists()
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"arch": "qwen2"}, "general.architecture is 'qwen2'; only 'llama'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; only 'smollm'"),
        ({"scaling": True}, "llama.rope.scaling.type is set; RoPE scaling is not supported"),
        ({"extra": "rope_freqs"}, "has a tensor 'rope_freqs.weight'"),
        ({"extra": "blk.0.attn_q_norm"}, "has a tensor 'blk.0.attn_q_norm.weight'"),
    ],
)
def test_other_files_are_refused_and_nothing_is_left(
    tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    source = TinyGGUF(tmp_path / "tiny.gguf", **changes)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelError) as caught:
        import_gguf(source.path, tmp_path / "models" / "tiny", print)
    assert fault in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("size", [0, 3, 100, 2000, -40])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    source = TinyGGUF(tmp_path / "tiny.gguf")
    source.path.write_bytes(source.path.read_bytes()[:size])
    with pytest.raises(ModelError, match="is not a usable GGUF file"):
        import_gguf(source.path, tmp_path / "model", print)
    assert not (tmp_path / "model").exists()


@pytest.fixture(scope="module")
def oracle(embedded_model: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(embedded_model)


@torch.inference_mode()
def test_the_embedded_model_predicts_english(oracle: tuple[Any, Any]) -> None:
    model, tokenizer = oracle
    ids = tokenizer(ENGLISH, return_tensors="pt")["input_ids"]
    loss = model(ids, labels=ids).loss.item()
    assert loss < 3.5, f"nats per token: {loss}"  # 3.16; 4.76 with the rows as the file has them


@torch.inference_mode()
def test_the_embedded_model_answers(oracle: tuple[Any, Any]) -> None:
    model, tokenizer = oracle
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40
    )[0]
    answer = tokenizer.decode(output[prompt.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_the_embedded_weights_keep_their_4_bit_grid(embedded_model: Path) -> None:
    weight = load_file(embedded_model / "model.safetensors")[
        "model.layers.17.self_attn.k_proj.weight"
    ]
    blocks = weight.reshape(-1, 32)
    assert max(len(np.unique(block)) for block in blocks) == 16

"""A rotated model computes the same function (fp32), and families that cannot are refused.

Oracle: transformers' own logits of the unrotated model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.batch import Segment, build_batch
from engine.errors import ModelError
from engine.memory.kv_cache import KVCache
from engine.memory.sequence import IdDigest, Sequence
from engine.model.attention import FixedGate, StepAttention
from engine.model.decoder import Decoder
from engine.model.geometry import ModelConfig, weight_shapes
from engine.model.model_config import read_model_config
from engine.model.rotation import GetTensor, rotated, rotated_config, rotation_matrix
from engine.model.weights import Weights, inverse_frequencies, make_layer
from kernels.kv import rope_table
from kernels.linear import PackedLinear
from tests.engine.harness import make_tiny_model, random_ids

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},  # biases of Q, K and V
    "Qwen3": {},  # norms of Q and K
}


def rotated_getter(model_dir: Path, original: ModelConfig) -> GetTensor:
    tensors = load_file(model_dir / "model.safetensors")
    return rotated(lambda name: tensors[name].float(), original)


def rotated_weights(model_dir: Path, original: ModelConfig) -> Weights:
    """The model's weights in the rotated basis, packed in fp32."""
    get, config = rotated_getter(model_dir, original), rotated_config(original)
    prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]
    return Weights(
        config=config,
        dtype=torch.float32,
        embedding=get("model.embed_tokens.weight"),
        layers=tuple(make_layer(get, config.family, prefix) for prefix in prefixes),
        final_norm=get("model.norm.weight"),
        head=PackedLinear(get("lm_head.weight")),
        cos_sin=rope_table(inverse_frequencies(config), 512),
        fingerprint=b"",
    )


def logits(weights: Weights, ids: list[int]) -> Tensor:
    """Next-token logits behind each of some prefixes of the ids, fp32 [n, vocab_size]."""
    config = weights.config
    cache = KVCache(config.num_layers, 4, config.num_kv_heads, config.head_dim, torch.float32)
    decoder = Decoder(weights, cache)
    rows = []
    for end in (1, 70, len(ids)):
        seq = Sequence("chat", ids, 0, IdDigest())
        seq.page_ids = [2, 0, 3]
        batch = build_batch([], [Segment(seq, (), 0, end, True)])
        attention = StepAttention(batch, config.num_heads, config.head_dim, FixedGate(True))
        rows.append(decoder.forward(batch, attention, None))
    return torch.cat(rows)


@torch.inference_mode()
def expected_logits(model_dir: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    whole: Tensor = model(torch.tensor([ids])).logits[0]
    return whole[[0, 69, len(ids) - 1]]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_same_logits_in_the_rotated_basis(tmp_path: Path, family: str) -> None:
    model_dir = make_tiny_model(tmp_path, num_kv_heads=2, family=family, **FAMILIES[family])
    ids = random_ids(130, 4)
    original = read_model_config(model_dir)
    found = logits(rotated_weights(model_dir, original), ids)
    expected = expected_logits(model_dir, ids)
    # the tiny models' logits reach 100, eight times a trained model's: 1e-4 of their scale
    assert float((found - expected).abs().max()) < 1e-4 * max(1.0, float(expected.std()))


def test_the_embedded_model_rotated(embedded_model: Path) -> None:
    """Real weights, a tied head, and a width that is no power of two."""
    original = read_model_config(embedded_model)
    assert original.tie_word_embeddings
    ids = list(range(1000, 1130))
    found = logits(rotated_weights(embedded_model, original), ids)
    expected = expected_logits(embedded_model, ids)
    assert float((found - expected).abs().max()) < 1e-4


def test_the_stream_itself_is_rotated(tmp_path: Path) -> None:
    """Not just undone: an embedding's row is its old row times Q, and every norm is one."""
    model_dir = make_tiny_model(tmp_path, num_kv_heads=2)
    original = read_model_config(model_dir)
    weights = rotated_weights(model_dir, original)
    before = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    expected = before.double() @ rotation_matrix(original.hidden_size)
    torch.testing.assert_close(weights.embedding, expected.float(), rtol=1e-5, atol=1e-6)
    config = rotated_config(original)
    get = rotated_getter(model_dir, original)
    for name, shape in weight_shapes(config).items():
        assert get(name).shape == shape
    for layer in weights.layers:
        assert bool((layer.attention_norm == 1).all())
        assert bool((layer.mlp_norm == 1).all())


@pytest.mark.parametrize("width", [1, 8, 100, 128, 576, 896, 960, 2048])
def test_orthogonal_and_flat_where_a_hadamard_matrix_is_known(width: int) -> None:
    matrix = rotation_matrix(width)
    torch.testing.assert_close(
        matrix @ matrix.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert torch.equal(matrix, rotation_matrix(width))
    if width != 100:  # 25 times 4: no order of a Paley matrix, so it is a QR decomposition's
        torch.testing.assert_close(
            matrix.abs() * width**0.5, torch.ones_like(matrix), rtol=0, atol=1e-12
        )


def test_a_family_that_normalises_after_is_refused(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, num_kv_heads=2, family="Olmo2")
    config = read_model_config(model_dir)
    with pytest.raises(ModelError, match="Olmo2ForCausalLM normalises the output"):
        rotated_config(config)
    with pytest.raises(ModelError, match="cannot be rotated"):
        rotated(lambda _: torch.empty(0), replace(config, tie_word_embeddings=True))

"""Every family: logits of transformers, and the same answers after each kind of restore (fp32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.model_config import read_model_config
from engine.model.weights import inverse_frequencies
from tests.engine.harness import HarnessFactory, Oracle, make_tiny_model, random_ids

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": LLAMA3},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
    "Olmo2": {},
}
PREFIX = random_ids(100, 1)
MAX_TOKENS = 10


@pytest.fixture(scope="module", params=list(FAMILIES))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return make_tiny_model(
        tmp_path_factory.mktemp(family), num_kv_heads=2, family=family, **FAMILIES[family]
    )


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


def decided(reference: Oracle, history: list[int]) -> tuple[list[int], list[int]]:
    """A message whose greedy answer rests on no tie, and that answer."""
    for seed in range(50):
        new = random_ids(30, 100 + seed)
        answer, gap = reference.choices(PREFIX + history + new, MAX_TOKENS)
        if gap > 5e-3:
            return new, answer
    raise AssertionError("every answer rests on a tie")


@pytest.mark.parametrize("method", ["hidden", "kv", "recompute"])
def test_a_chat_and_its_return(
    model_dir: Path, reference: Oracle, tmp_path: Path, method: str
) -> None:
    factory = HarnessFactory(model_dir)
    harness = factory(disk=tmp_path, checkpoint_method=method)
    new, expected = decided(reference, [])
    others = [harness.submit(random_ids(20 + i, i), chat=f"c{i}", prefix=PREFIX) for i in range(3)]
    first = harness.submit(new, prefix=PREFIX, max_tokens=MAX_TOKENS)
    harness.run()
    assert harness.ids(first) == expected
    assert all(harness.ids(other) for other in others)
    factory.close(harness)

    harness = factory(disk=tmp_path, checkpoint_method=method)
    history = new + expected
    new, expected = decided(reference, history)
    computed = len(history) - 1
    again = harness.submit(
        new, prefix=PREFIX, history=history, computed=computed, max_tokens=MAX_TOKENS
    )
    harness.run()
    assert harness.ids(again) == expected
    stats = harness.done(again).stats
    assert stats.restored_tokens == (0 if method == "recompute" else computed)
    factory.close(harness)


def test_llama_3_rope_scaling(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model_dir = make_tiny_model(tmp_path, num_kv_heads=2, rope_parameters=LLAMA3)
    config = read_model_config(model_dir)
    assert config.rope_scaling is not None
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(model_dir), None)
    assert factor == 1.0
    torch.testing.assert_close(inverse_frequencies(config), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Mistral", {"sliding_window": 512}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}),
    ],
)
def test_sliding_windows_are_refused(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    from engine.errors import ModelError

    model_dir = make_tiny_model(tmp_path, num_kv_heads=2, family=family, **options)
    with pytest.raises(ModelError, match="sliding"):
        read_model_config(model_dir)

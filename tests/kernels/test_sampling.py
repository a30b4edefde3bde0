"""Chosen tokens against a plain sort in fp64, over whole vocabularies and both dtypes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.model.sampler import sample, sample_reference
from kernels.sampling import choose_tokens

RULES = [
    SamplingParams(temperature=0.7, top_p=0.95, seed=1),
    SamplingParams(temperature=1.5, top_p=0.999, seed=2),
    SamplingParams(temperature=1.0, top_p=0.9999999, seed=3),
    SamplingParams(temperature=1.0, top_p=1.0, seed=4),
    SamplingParams(temperature=0.3, top_p=0.0, seed=5),
    SamplingParams(temperature=1.0, top_p=0.7, top_k=50, seed=6),
    SamplingParams(temperature=2.0, top_p=1.0, top_k=5000, seed=7),
    SamplingParams(temperature=2.0, top_p=1.0, top_k=3, seed=10),
    SamplingParams(temperature=1.0, top_p=1.0, min_p=0.02, seed=8),
    SamplingParams(temperature=1.0, top_p=0.99, top_k=100, min_p=0.1, seed=9),
    SamplingParams(temperature=0.0),
]


def logits_of(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Some tokens far ahead of the rest, as a model's are; one row nearly flat."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size, generator=generator) * 2
    logits[:, : size // 20] += torch.rand(rows, size // 20, generator=generator) * 9
    logits[-1] = torch.randn(size, generator=generator) * 0.01
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [100, 4096, 49152])
def test_tokens_are_those_of_a_row_by_row_sampler(size: int, dtype: torch.dtype) -> None:
    logits = logits_of(len(RULES), size, dtype)
    different = 0
    for shift in range(len(RULES)):
        params = RULES[shift:] + RULES[:shift]
        positions = [17 * shift + i for i in range(len(params))]
        none = [None] * len(params)
        expected = sample_reference(logits, params, positions, none, [3] * len(params))
        tokens = sample(logits, params, positions, none, [3] * len(params))
        different += int((tokens != expected).sum())
    assert different <= 1  # of 121: fp32 weights may move an edge by their last bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 255, 256, 1023, 1100])
def test_greedy_is_the_lowest_id_of_the_largest_logit(place: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 1105).to(dtype)
    logits[1, place:] = 50.0
    logits[2] = -math.inf
    greedy, rule = np.ones(3, np.bool_), np.zeros((3, 4))
    tokens = choose_tokens(logits, np.zeros(3, np.int64), greedy, rule)
    assert tokens.tolist() == [int(logits[0].float().argmax()), place, 0]


def test_noise_at_its_ends_draws_tokens_that_have_weight() -> None:
    logits = torch.full((2, 512), -math.inf)
    logits[:, [7, 300]] = 0.0
    rule = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1 - 2.0**-53]])
    plain, greedy = np.zeros(2, np.int64), np.zeros(2, np.bool_)
    assert choose_tokens(logits, plain, greedy, rule).tolist() == [7, 300]
    rule[:, 1] = 0.99
    assert choose_tokens(logits, plain, greedy, rule).tolist() == [7, 300]


def test_what_has_no_finite_maximum_is_told() -> None:
    logits = torch.randn(4, 320)
    logits[0, 319], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    rule = np.array([[1.0, 0.9, 0.0, 0.5]] * 4)
    plain, greedy = np.zeros(4, np.int64), np.zeros(4, np.bool_)
    tokens = choose_tokens(logits, plain, greedy, rule)
    assert tokens[:3].tolist() == [-1, -1, -1]
    assert tokens[3] >= 0
    with pytest.raises(ValueError, match="float16"):
        choose_tokens(logits.half(), plain, greedy, rule)

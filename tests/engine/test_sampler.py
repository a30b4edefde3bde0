"""The sampler against a distribution worked out token by token in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import SamplingParams
from engine.model.sampler import PenaltyState, sample, uniform

DRAWS = 4000


def reference_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Probabilities by the definition: temperature, top-k, top-p, min-p, in plain Python."""
    largest = max(logits)
    weights = [math.exp((value - largest) / params.temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    mass = sum(weights[token] for token in order)
    kept: list[int] = []
    reached = 0.0
    for token in order:
        if kept and reached >= params.top_p * mass:
            break
        kept.append(token)
        reached += weights[token]
    best = weights[order[0]]
    kept = [token for token in kept if weights[token] >= min(params.min_p, 1.0) * best]
    total = sum(weights[token] for token in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(weights))]


def draw(logits: torch.Tensor, params: SamplingParams, count: int = DRAWS) -> np.ndarray:
    """Tokens at positions 0 .. count - 1 for the same logits."""
    tokens = [
        sample(logits.expand(64, -1), [params] * 64, range(start, start + 64))
        for start in range(0, count, 64)
    ]
    return np.concatenate(tokens)[:count]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=1.0),
        SamplingParams(temperature=0.6, top_p=1.0),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, top_p=1.0, top_k=7),
        SamplingParams(temperature=1.0, top_p=0.7, top_k=12),
        SamplingParams(temperature=1.0, top_p=1.0, min_p=0.15),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.05),
        SamplingParams(temperature=1.0, top_p=1.0, top_k=1000),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(3)) * 2.5
    expected = np.array(reference_distribution(logits[0].tolist(), params)) * DRAWS
    counts = np.bincount(draw(logits, params), minlength=700)
    assert counts[expected == 0].sum() == 0
    # Chi-square over the tokens that are expected often enough, the rest as one class.
    often = expected >= 8
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    # Five standard deviations over the mean of the chi-square distribution.
    assert chi_square < freedom + 5 * math.sqrt(2 * max(freedom, 1))


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.integers(-60, 60), min_size=1, max_size=40),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.integers(0, 45),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(-(2**70), 2**70),
)
def test_only_tokens_of_the_kept_set_are_drawn(
    values: list[int], temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    logits = [value / 10 for value in values]
    # A hair's breadth around a cut, either side is right.
    near = [
        reference_distribution(
            logits, msgspec.structs.replace(params, top_p=top_p * (1 + sign * 1e-5))
        )
        for sign in (-1, 1)
    ]
    for token in draw(torch.tensor([logits]), params, 64):
        assert any(distribution[token] > 0 for distribution in near)


def test_a_full_vocabulary_gives_the_same_tokens_as_the_plain_definition() -> None:
    generator = torch.Generator().manual_seed(11)
    scale = torch.tensor([[0.1], [1], [2], [3], [5], [9]])
    logits = torch.randn(6, 49152, generator=generator) * scale
    every = [
        SamplingParams(temperature=0.7, top_p=0.95, seed=5),
        SamplingParams(temperature=1.0, top_p=0.999, seed=6),
        SamplingParams(temperature=1.0, top_p=0.5, top_k=3000, seed=7),
        SamplingParams(temperature=1.0, top_p=1.0, top_k=40, seed=8),
        SamplingParams(temperature=1.0, top_p=1.0, min_p=0.02, seed=9),
        SamplingParams(temperature=1.0, top_p=1.0, seed=10),
    ]
    for params in every:
        tokens = sample(logits, [params] * 6, [1, 2, 3, 4, 5, 6])
        for row in range(6):
            weights = np.array(reference_weights(logits[row].double().numpy(), params))
            running = np.cumsum(weights)
            target = uniform(params.seed, 0, row + 1) * running[-1]
            expected = int(np.searchsorted(running, target, side="right"))
            # fp32 weights move an edge by a few parts in ten million at most.
            around = np.abs(running[[max(expected - 1, 0), expected]] - target) / running[-1]
            assert tokens[row] == expected or around.min() < 1e-6


def reference_weights(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The kept weights in the order of the ids, by full sorts in fp64."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    keep = np.ones(len(order), dtype=bool)
    if params.top_k:
        keep[params.top_k :] = False
    mass = weights[order][keep]
    keep[: len(mass)] &= (np.cumsum(mass) - mass) < params.top_p * mass.sum()
    keep &= weights[order] >= params.min_p
    result: np.ndarray = np.zeros_like(weights)
    result[order[keep]] = weights[order[keep]]
    return result


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(33, 5000, generator=generator) * 3
    params = [
        SamplingParams(
            temperature=[0.0, 0.7, 1.2][row % 3], top_p=[1.0, 0.9][row % 2], seed=row * 7
        )
        for row in range(33)
    ]
    positions = [row * 13 for row in range(33)]
    together = sample(logits, params, positions)
    alone = [sample(logits[r : r + 1], [params[r]], [positions[r]])[0] for r in range(33)]
    assert together.tolist() == alone
    backwards = sample(logits.flip(0), params[::-1], positions[::-1])
    assert backwards[::-1].tolist() == alone
    assert together.dtype == np.int64


def test_temperature_zero_is_the_first_largest_and_leaves_the_logits() -> None:
    logits = torch.tensor([[0.0, 4.0, 4.0, 1.0], [9.0, 1.0, 2.0, 3.0]])
    before = logits.clone()
    assert sample(logits, [SamplingParams(temperature=0)] * 2, [0, 0]).tolist() == [1, 0]
    mixed = [SamplingParams(temperature=0), SamplingParams(temperature=1.0)]
    assert sample(logits, mixed, [0, 0])[0] == 1
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1.0, min_p=1.0, top_p=1.0),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1e-30, top_p=1.0),
    ],
)
def test_extremes_leave_the_best_token(params: SamplingParams) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    assert set(draw(logits, params, 200).tolist()) == {int(logits.argmax())}


def test_equal_logits_at_the_cut_keep_the_lower_ids() -> None:
    logits = torch.zeros(1, 10)
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=3)
    assert set(draw(logits, params, 300).tolist()) == {0, 1, 2}
    params = SamplingParams(temperature=1.0, top_p=0.35)
    assert set(draw(logits, params, 300).tolist()) == {0, 1, 2, 3}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 600), -math.inf)
    logits[0, [5, 300]] = 1.0
    assert set(draw(logits, SamplingParams(temperature=2.0, top_p=1.0), 300).tolist()) == {5, 300}
    with pytest.raises(ValueError, match="largest logit"):
        sample(torch.full((1, 4), math.nan), [SamplingParams()], [0])


def test_noise_is_uniform_and_independent() -> None:
    numbers = np.array([uniform(seed, 0, p) for seed in range(80) for p in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    assert ((counts - 160) ** 2 / 160).sum() < 49 + 5 * math.sqrt(98)
    grid = numbers.reshape(80, 100)
    for one, other in [(grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])]:
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 0.06
    assert len({uniform(1, 2, 3), uniform(3, 2, 1), uniform(1, 3, 2), uniform(2, 1, 3)}) == 4
    assert uniform(7, 0, 9) == uniform(7, 0, 9)


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4))
    prompt, answer = [3, 3, 9, 11], [9, 20, 20]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([prompt + answer]), logits.clone()
    )
    row = logits[0].numpy().copy()
    penalised(SamplingParams(repetition_penalty=1.7), prompt, answer).apply(row)
    np.testing.assert_allclose(row, expected[0].numpy(), rtol=1e-6)


def penalised(params: SamplingParams, prompt: list[int], answer: list[int]) -> PenaltyState:
    state = PenaltyState.for_request(params, prompt)
    assert state is not None
    for token in answer:
        state.push(token)
    return state


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 199), max_size=30),
    answer=st.lists(st.integers(0, 199), max_size=300),
)
def test_presence_and_frequency_count_the_answer_only(prompt: list[int], answer: list[int]) -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    row = np.zeros(200, dtype=np.float32)
    penalised(params, prompt, answer).apply(row)
    expected = [
        -0.25 * answer.count(token) - (0.5 if token in answer else 0.0) for token in range(200)
    ]
    np.testing.assert_allclose(row, expected, atol=1e-5)


def test_penalties_change_the_greedy_token_of_their_row_only() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9], [1.0, 3.0, 2.9]])
    params = SamplingParams(temperature=0, frequency_penalty=0.2)
    state = penalised(params, [], [1])
    tokens = sample(logits, [params, SamplingParams(temperature=0)], [5, 5], [state, None])
    assert tokens.tolist() == [2, 1]
    assert logits[0, 1] == 3.0
    assert PenaltyState.for_request(SamplingParams(), [1, 2]) is None

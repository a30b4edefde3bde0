"""Choosing the next token of each row of logits, each row as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.messages import SamplingParams

Row = npt.NDArray[np.float32]

_BLOCK = 256
_MASK = (1 << 64) - 1
_MIN_TEMPERATURE = 1e-6
# Candidates are gathered by weight relative to the best token's; the last step takes all that
# have any. Most rows need the first only, so nothing like the whole vocabulary is sorted.
_FLOORS = (1e-2, 1e-3, 1e-4, 1e-6, np.finfo(np.float32).smallest_subnormal)


class LogitShaper(Protocol):
    """Changes one request's logits before a token is chosen from them."""

    def apply(self, row: Row) -> None:
        """`row` [vocab_size] fp32, written; at least one entry stays finite."""


class PenaltyState:
    """The tokens that a request's penalties apply to; owned by the request.

    The repetition penalty counts prompt and answer as transformers does, the presence and
    frequency penalties only the answer, as OpenAI does.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        prompt = prompt_ids if params.repetition_penalty != 1.0 else ()
        self._ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)  # in the answer
        self._slots = {token_id: slot for slot, token_id in enumerate(self._ids.tolist())}
        self._used = len(self._ids)

    @classmethod
    def for_request(cls, params: SamplingParams, prompt_ids: Sequence[int]) -> PenaltyState | None:
        """None when no penalty is set."""
        off = (1.0, 0.0, 0.0)
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == off:
            return None
        return cls(params, prompt_ids)

    def push(self, token_id: int) -> None:
        """Count one more token of the answer."""
        slot = self._slots.setdefault(token_id, self._used)
        if slot == self._used:
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(slot + 64, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(slot + 64, np.float32)])
            self._ids[slot] = token_id
            self._used += 1
        self._counts[slot] += 1

    def apply(self, row: Row) -> None:
        """Lower the logits of these tokens; `row` [vocab_size] fp32, written."""
        params = self._params
        ids, counts = self._ids[: self._used], self._counts[: self._used]
        values = row[ids]
        if params.repetition_penalty != 1.0:
            factor = np.float32(params.repetition_penalty)
            values = np.where(values < 0, values * factor, values / factor)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        row[ids] = values


def uniform(seed: int, candidate: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else (splitmix64 over the three)."""
    return float(_uniforms([seed], [candidate], [position])[0])


def _uniforms(
    seeds: Sequence[int], candidates: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    state = np.zeros(len(seeds), np.uint64)
    for numbers in (seeds, candidates, positions):
        words = np.array([number & _MASK for number in numbers], np.uint64)
        state = _mix((state ^ _mix(words)) + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea and Flood 2014) after its increment."""
    words = words + np.uint64(0x9E3779B97F4A7C15)  # modulo 2**64, as all of it
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    shapers: Sequence[LogitShaper | None] | None = None,
    candidates: Sequence[int] | None = None,
) -> npt.NDArray[np.int64]:
    """The next token of each row, [batch] int64.

    `logits` [batch, vocab_size] fp32 or bf16 is not written. `positions` are those that the new
    tokens will have; `candidates` (default 0) tell rows of one prompt and seed apart. A row's
    token depends on its own logits, parameters, position, shaper and candidate only.
    Temperature 0 is greedy (the lowest id of equal logits). Otherwise, as in transformers:
    shaper, temperature, top-k, top-p, min-p. Raises ValueError when a row that is to be
    sampled has no finite maximum.
    """
    states = [None] * len(params) if shapers is None else shapers
    numbers = [0] * len(params) if candidates is None else candidates
    if not len(logits) == len(params) == len(positions) == len(states) == len(numbers):
        raise ValueError(f"{len(logits)} rows of logits for {len(params)} requests")
    if logits.is_cuda:
        return _sample_on_cuda(logits, params, positions, states, numbers)
    from kernels.sampling import choose_tokens  # not where there is no numba

    shaped = [index for index, state in enumerate(states) if state is not None]
    greedy = np.array([own.temperature <= 0 for own in params])
    top_k = np.array([own.top_k for own in params], np.int64)
    rule = np.zeros((len(params), 4))
    if not greedy.all():
        rule[:, 0] = [max(own.temperature, _MIN_TEMPERATURE) for own in params]
        rule[:, 1] = [own.top_p for own in params]
        rule[:, 2] = [own.min_p for own in params]
        rule[:, 3] = _uniforms([own.seed for own in params], numbers, positions)
    logits = logits.detach()
    if not shaped:
        return _finite(choose_tokens(logits, top_k, greedy, rule), logits)
    tokens = np.empty(len(params), np.int64)
    plain = [index for index, state in enumerate(states) if state is None]
    rows = logits[shaped].to(torch.float32)  # a copy
    for row, index in zip(rows.numpy(), shaped, strict=True):
        state = states[index]
        assert state is not None, "a row without a shaper was taken for one with it"
        state.apply(row)
    for part, own_rows in ((shaped, rows), (plain, logits[plain])):
        if part:
            chosen = choose_tokens(own_rows, top_k[part], greedy[part], rule[part])
            tokens[part] = _finite(chosen, own_rows)
    return tokens


def _finite(tokens: npt.NDArray[np.int64], logits: Tensor) -> npt.NDArray[np.int64]:
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"the largest logit is {float(logits[int(tokens.argmin())].max())}")
    return tokens


def _sample_on_cuda(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    shapers: Sequence[LogitShaper | None],
    candidates: Sequence[int],
) -> npt.NDArray[np.int64]:
    """Greedy rows there, all others here; by numpy, which needs nothing compiled."""
    if all(own.temperature <= 0 for own in params) and not any(shapers):
        best: npt.NDArray[np.int64] = logits.argmax(dim=-1).cpu().numpy()
        return best
    return sample_reference(logits.cpu(), params, positions, shapers, candidates)


def sample_reference(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    shapers: Sequence[LogitShaper | None],
    candidates: Sequence[int],
) -> npt.NDArray[np.int64]:
    """`sample`, row by row with numpy; logits on the CPU."""
    tokens = np.empty(len(params), dtype=np.int64)
    rows: npt.NDArray[np.float32] = logits.detach().to(torch.float32).numpy()
    for index, (row, own, position, state, number) in enumerate(
        zip(rows, params, positions, shapers, candidates, strict=True)
    ):
        if state is not None:
            row = row.copy()
            state.apply(row)
        if own.temperature <= 0:
            tokens[index] = row.argmax()
        else:
            tokens[index] = _sample_row(row, own, uniform(own.seed, number, position))
    return tokens


def _sample_row(row: Row, params: SamplingParams, noise: float) -> int:
    """One token by inversion of the distribution function, from one uniform number."""
    best = row.max()
    if not np.isfinite(best):
        raise ValueError(f"the largest logit is {best}")
    with np.errstate(over="ignore"):  # a low temperature takes the others to minus infinity
        weights = np.exp((row - best) / np.float32(max(params.temperature, _MIN_TEMPERATURE)))
    top_k = params.top_k if 0 < params.top_k < len(row) else 0
    if not top_k and params.top_p >= 1.0:
        if params.min_p <= 0.0:
            return _invert(weights, noise)
        ids = np.flatnonzero(weights >= min(params.min_p, 1.0))
        return int(ids[_invert(weights[ids], noise)])

    ids, whole = _candidates(weights, top_k, params.top_p)
    own = weights[ids]
    best_first = np.sort(own)[::-1]
    count = len(best_first)
    if top_k:
        count = min(top_k, count)
        whole = float(best_first[:count].sum(dtype=np.float64))
    if params.top_p < 1.0:
        count = min(count, 1 + _search(best_first[:count], params.top_p * whole, "left"))
    if params.min_p > 0.0:
        count = int(np.count_nonzero(best_first[:count] >= min(params.min_p, 1.0)))
    smallest = best_first[count - 1]
    chosen = own > smallest
    equals = np.flatnonzero(own == smallest)  # the lower ids first, as many as there is room for
    chosen[equals[: count - np.count_nonzero(chosen)]] = True
    return int(ids[chosen][_invert(own[chosen], noise)])


def _candidates(weights: Row, top_k: int, top_p: float) -> tuple[npt.NDArray[np.int64], float]:
    """Ids, ascending, among which are the `top_k` best, or else those that hold `top_p`.

    Also the whole mass, which is 0 with `top_k`, where it is not needed.
    """
    whole = 0.0 if top_k else float(weights.sum(dtype=np.float64))
    ids = np.empty(0, dtype=np.int64)
    for floor in _FLOORS:
        ids = np.flatnonzero(weights >= floor)
        if len(ids) < top_k:
            continue
        if top_k or weights[ids].sum(dtype=np.float64) >= top_p * whole:
            break
    return ids, whole


def _invert(weights: Row, noise: float) -> int:
    """The index at which the running sum of weights passes `noise` of the total."""
    total = float(_block_sums(weights).sum())
    index = _search(weights, noise * total, "right")
    if index < len(weights) and weights[index] > 0:
        return index
    # Sums of blocks and of single weights differ in their last bits: one past the end of a block.
    return int(np.flatnonzero(weights[:index])[-1])


def _search(weights: Row, target: float, side: Literal["left", "right"]) -> int:
    """Where the running sum of weights reaches ("left") or passes ("right") `target`.

    In two steps, since a running sum over a whole vocabulary is slow.
    """
    sums = np.cumsum(_block_sums(weights))
    block = min(int(np.searchsorted(sums, target, side=side)), len(sums) - 1)
    start = block * _BLOCK
    before = sums[block - 1] if block else 0.0
    running = before + np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + int(np.searchsorted(running, target, side=side))


def _block_sums(weights: Row) -> npt.NDArray[np.float64]:
    starts = np.arange(0, len(weights), _BLOCK)
    return np.add.reduceat(weights, starts, dtype=np.float64)

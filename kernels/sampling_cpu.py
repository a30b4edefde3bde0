"""Choosing a token from each row of logits: no sort over the vocabulary, rows dealt to threads."""

# Argument lists of ten numbers, one to a line, would hide the code.
# fmt: off
from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # numba exports it at run time

from kernels.attention_tile import jit
from kernels.parallel import Worker, gomp_parallel, team_size, thread_number
from kernels.rows_cpu import word
from kernels.sampling_ir import (
    float32_pointer,
    float64_pointer,
    int32_pointer,
    largest,
    weigh,
    widen,
)
from kernels.vector_ir import int64_pointer

BLOCK = 256  # logits that are skipped together
BUCKETS = 1024  # of weights, an eighth of an octave each
WORDS = 3  # of a row: its address, top_k (0: none), whether it is greedy
NUMBERS = 4  # of a row: temperature, top_p, min_p, noise
_LOG2E = math.log2(math.e)
_ONE = 0x3F800000  # the bits of 1.0
# Candidates are gathered by weight relative to the best token's, powers of two; the last step
# takes all that have any. Most rows need the first only.
_LEVELS = (-7.0, -14.0, -21.0, -30.0, -200.0)


@jit
def scratch_bytes(size: Any):
    """Working memory that a thread needs for rows of `size` logits."""
    blocks = (size + BLOCK - 1) // BLOCK
    return 64 + 12 * size + 16 * blocks + 16 * BUCKETS


@jit
def _vectors(block, size):
    return (min(size, (block + 1) * BLOCK) - block * BLOCK) // 16


@jit
def _maxima(bf16, x, size, maxima):
    """The largest logit of each block to `maxima`; returns that of all, NaN if one is."""
    width = 2 if bf16 else 4
    top = np.float32(-np.inf)
    for block in range(len(maxima)):
        at = x + block * BLOCK * width
        vectors = _vectors(block, size)
        best = largest(1, at, vectors) if bf16 else largest(0, at, vectors)
        if best != best:
            return best
        maxima[block] = best
        top = max(top, best)
    return top


@jit
def _first_largest(bf16, x, size, top, maxima, work):
    """The lowest index of the largest logit."""
    for block in range(len(maxima)):
        if maxima[block] == top:
            vectors = _vectors(block, size)
            if bf16:
                widen(1, x + block * BLOCK * 2, work, vectors)
            else:
                widen(0, x + block * BLOCK * 4, work, vectors)
            logits = carray(float32_pointer(work), 16 * vectors)
            for i in range(len(logits)):
                if logits[i] == top:
                    return block * BLOCK + i
    return 0


@jit
def _weights(bf16, x, size, top, slope, out, sums):
    """Weights relative to the best token's, and the sums of the blocks; returns that of all."""
    whole = 0.0
    for block in range(len(sums)):
        at, to, vectors = block * BLOCK, out + block * BLOCK * 4, _vectors(block, size)
        if bf16:
            sums[block] = weigh(1, x + 2 * at, to, vectors, top, slope)
        else:
            sums[block] = weigh(0, x + 4 * at, to, vectors, top, slope)
        whole += sums[block]
    return whole


@jit
def _invert_all(weights, sums, target):
    """The index at which the running sum of all weights passes `target`."""
    before, last = 0.0, 0
    for block in range(len(sums)):
        if sums[block] > 0:
            last = block
            if before + sums[block] > target:
                break
            before += sums[block]
    index = last * BLOCK
    running = before if before + sums[last] > target else -np.inf  # past the end: its last one
    for i in range(last * BLOCK, min(len(weights), (last + 1) * BLOCK)):
        if weights[i] > 0:
            index = i
            running += weights[i]
            if running > target:
                break
    return index


@jit
def _gather(weights, maxima, top, slope, level, ids, own):
    """Tokens whose weight is above 0 and at least 2 ** level, by id; their number and mass."""
    floor = np.float32(2.0 ** level)
    count, mass = 0, 0.0
    for block in range(len(maxima)):
        if (maxima[block] - top) * slope < level - 0.01:
            continue
        for i in range(block * BLOCK, min(len(weights), (block + 1) * BLOCK)):
            weight = weights[i]
            if weight >= floor and weight > 0:
                ids[count], own[count] = i, weight
                count += 1
                mass += weight
    return count, mass


@jit
def _bucket(bits):
    """Of a weight in (0, 1] by its bits: the largest first."""
    return min(max((_ONE - bits) >> 20, 0), BUCKETS - 1)


@jit
def _inside(own, bits, bucket, size):
    """The `size` weights of a bucket, ascending."""
    found = np.empty(size, np.float32)
    at = 0
    for i in range(len(own)):
        if _bucket(bits[i]) == bucket:
            found[at] = own[i]
            at += 1
    found.sort()
    return found


@jit
def _cut(own, bits, limit, share, whole, counts, masses):
    """The smallest weight that is kept, and how many tokens of exactly that weight are.

    The rule is that of a sort by weight: at most `limit` tokens, and the fewest that hold `share`
    of `whole`; whole < 0: of what the limit leaves.
    """
    counts[:] = 0
    masses[:] = 0.0
    for i in range(len(own)):
        bucket = _bucket(bits[i])
        counts[bucket] += 1
        masses[bucket] += own[i]
    target = np.inf
    if share < 1.0:
        if whole < 0:
            _, _, whole = _walk(own, bits, limit, np.inf, counts, masses)
        target = share * whole
    smallest, equal, _ = _walk(own, bits, limit, target, counts, masses)
    return smallest, equal


@jit
def _walk(own, bits, limit, target, counts, masses):
    """Take the heaviest tokens up to `limit` or until they hold `target`.

    Returns the last one's weight, how many of that weight were taken, and the mass taken.
    """
    taken, mass, bucket = 0, 0.0, 0
    while taken + counts[bucket] < limit and mass + masses[bucket] < target:
        taken += counts[bucket]
        mass += masses[bucket]
        bucket += 1
        if bucket == BUCKETS:
            return np.float32(0.0), 0, mass
    inside = _inside(own, bits, bucket, counts[bucket])
    at = len(inside) - 1
    while at > 0 and taken + 1 < limit and mass + inside[at] < target:
        taken += 1
        mass += inside[at]
        at -= 1
    equal = 0
    for i in range(at, len(inside)):
        equal += inside[i] == inside[at]
    return inside[at], equal, mass + inside[at]


@jit
def _draw(ids, own, smallest, equal, noise):
    """A token among those above `smallest` and the first `equal` of exactly that weight."""
    total, left = 0.0, equal
    for i in range(len(own)):
        same = own[i] == smallest and left > 0
        left -= same
        if same or own[i] > smallest:
            total += own[i]
    target, running, left, last = noise * total, 0.0, equal, 0
    for i in range(len(own)):
        same = own[i] == smallest and left > 0
        left -= same
        if same or own[i] > smallest:
            running += own[i]
            last = i
            if running > target:
                break
    return ids[last]


@jit
def _token(bf16, x, size, top_k, greedy, temperature, top_p, min_p, noise, work):
    """The token of one row; -1 when the largest logit is not finite."""
    blocks = (size + BLOCK - 1) // BLOCK
    sums = carray(float64_pointer(work), blocks)
    masses = carray(float64_pointer(work + 8 * blocks), BUCKETS)
    work += 8 * (blocks + BUCKETS)
    counts = carray(int64_pointer(work), BUCKETS)
    maxima = carray(float32_pointer(work + 8 * BUCKETS), blocks)
    place = work + 8 * BUCKETS + 8 * blocks
    top = _maxima(bf16, x, size, maxima)
    if greedy:
        return _first_largest(bf16, x, size, top, maxima, place)
    if not np.isfinite(top):
        return -1
    slope = np.float32(_LOG2E / temperature)
    weights = carray(float32_pointer(place), size)
    whole = _weights(bf16, x, size, top, slope, place, sums)
    if top_k == 0 and top_p >= 1.0 and min_p <= 0.0:
        return _invert_all(weights, sums, noise * whole)
    ids = carray(int32_pointer(place + 4 * size), size)
    own = carray(float32_pointer(place + 8 * size), size)
    least = np.float32(min(min_p, 1.0))
    count = 0
    for level in _LEVELS:
        count, mass = _gather(weights, maxima, top, slope, level, ids, own)
        if least >= 2.0 ** level:  # what is lighter falls to min_p
            break
        if top_k > 0 and count >= top_k:
            break
        if top_k == 0 and top_p < 1.0 and mass >= top_p * whole:
            break
    own, bits = own[:count], carray(int32_pointer(place + 8 * size), count)
    limit = count if top_k == 0 else min(top_k, count)
    whole = -1.0 if top_k > 0 else whole
    smallest, equal = _cut(own, bits, limit, top_p, whole, counts, masses)
    if smallest < least:
        smallest, equal = least, count
    return _draw(ids, own, smallest, equal, noise)


@jit
def _rows(bf16, words, numbers, size, first, last, tokens, work):
    for row in range(first, last):
        w, n = words + 8 * WORDS * row, 4 * row
        tokens[row] = _token(
            bf16, word(w, 0), size, word(w, 1), word(w, 2) != 0, numbers[n], numbers[n + 1],
            numbers[n + 2], numbers[n + 3], work,
        )


def _part(a):
    rows, part, parts = word(a, 0), thread_number(), team_size()
    _rows(
        word(a, 1) != 0, word(a, 2), carray(float64_pointer(word(a, 3)), NUMBERS * rows),
        word(a, 4), part * rows // parts, (part + 1) * rows // parts,
        carray(int64_pointer(word(a, 5)), rows), word(a, 6) + part * word(a, 7),
    )


PART = Worker(_part)


@jit
def choose(bf16: Any, words, numbers, size, rows, tokens, work, threads, part):
    """The token of each row to `tokens` int64; -1: the largest logit is not finite.

    size: logits of a row, a multiple of 16. words int64 [rows, WORDS]; numbers fp64 [rows,
    NUMBERS]; work: `scratch_bytes` for each thread. All but bf16, size, rows and threads are
    addresses.
    """
    threads = min(threads, rows)
    if threads == 1:
        _rows(
            bf16, words, carray(float64_pointer(numbers), NUMBERS * rows), size, 0, rows,
            carray(int64_pointer(tokens), rows), work,
        )
    else:
        a = np.array((
            rows, np.int64(bf16), words, numbers, size, tokens, work, scratch_bytes(size),
        ))
        gomp_parallel(part, a.ctypes.data, threads, 0)
        a[0] = 0  # numba frees an array after its last use: not before the call ends

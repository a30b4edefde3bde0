"""One block of many query rows against a tile of keys, with 16 query rows to a vector.

Scores are kept transposed, `[keys, rows]`: the softmax never crosses lanes, K is read in place from
its pages and V is re-laid once per tile. bf16 products are summed in fp32; weights are rounded to
bf16 for their product with V, and the softmax's denominator sums the rounded ones.
All arguments are numbers and addresses.
"""

# Argument lists of twenty numbers, one to a line, would hide the code.
# fmt: off
from __future__ import annotations

import math

import numpy as np
from numba import njit

from kernels.row_ir import copy_row, copy_vectors
from kernels.spans import PAGE_SIZE
from kernels.vector_ir import (
    LANES,
    fill,
    interleave,
    load_f32,
    load_i32,
    prefetch,
    scaled_add,
    softmax_column,
    store_f32,
    store_i32,
    tile_product,
)

TILE = 128  # keys; two pages, so that scores and weights of 96 rows stay in the L2 cache
MAX_ROWS = 96  # rows of a block: six vectors
FP32, BF16 = 0, 1  # the dtype of queries, keys and values
LN2 = math.log(2.0)
STATE_ROWS = 3 * MAX_ROWS  # running maximum, sum and factor in front of a state's sums

jit = njit(cache=True, error_model="numpy")


@jit
def head_floats(dim, rows):
    """fp32 numbers of one head's running state: maximum, sum, factor, then the sums."""
    return STATE_ROWS + dim * rows


@jit
def begin(state, dim, rows):
    """A state of no keys; rows * dim a multiple of 16."""
    fill(state, np.float32(-np.inf), MAX_ROWS)
    fill(state + 4 * MAX_ROWS, np.float32(0.0), 2 * MAX_ROWS + dim * rows)


@jit
def slot_of(pages, page_at, key):
    """Where a key of a segment lies, whose pages begin at entry page_at."""
    page = np.int64(load_i32(pages + 4 * (page_at + key // PAGE_SIZE)))
    return page * PAGE_SIZE + key % PAGE_SIZE


@jit
def prefetch_keys(k, v, slot, slot_bytes, offset, size, keys):
    """Ask for `size` bytes of the rows of some keys of one page."""
    for i in range(keys):
        place = (slot + i) * slot_bytes + offset
        prefetch(k + place, size)
        prefetch(v + place, size)


@jit
def _softmax(nv, pairs, masked, scores, row_bytes, keys, scale, limits, state):
    for j in range(nv):
        at = 64 * j
        s, top = scores + at, state + at
        total, factor = top + 4 * MAX_ROWS, top + 8 * MAX_ROWS
        if pairs:
            if masked:
                softmax_column(1, 1, s, row_bytes, keys, scale, limits + at, top, total, factor, s)
            else:
                softmax_column(1, 0, s, row_bytes, keys, scale, limits, top, total, factor, s)
        elif masked:
            softmax_column(0, 1, s, row_bytes, keys, scale, limits + at, top, total, factor, s)
        else:
            softmax_column(0, 0, s, row_bytes, keys, scale, limits, top, total, factor, s)


@jit
def pack_queries(kind, q, token, tokens, q_row, head, group, dim, rows, out):
    """out [steps, rows]: 32 bits of every row per step, rows padded with zeros."""
    width = 4 if kind == FP32 else 2
    steps = dim * width // 4
    for step in range(steps):
        for row in range(tokens * group, rows):
            store_i32(out + 4 * (step * rows + row), np.int32(0))
    for row in range(tokens * group):
        source = q + (token + row // group) * q_row + (head * group + row % group) * dim * width
        for step in range(steps):
            store_i32(out + 4 * (step * rows + row), load_i32(source + 4 * step))


@jit
def tile(
    kind, k, v, slot_bytes, offset, dim, nv, scale, pages, page_at, start, keys, next_at,
    next_start, next_keys, masked, limits, queries, scores, values, zeros, state,
):
    """One tile of keys for one KV head: scores, weights, weighted sums of V into its state.

    Meanwhile the next tile's rows are asked for, one cache line per step of the products.
    """
    row_bytes = 4 * nv * LANES
    size = dim * (4 if kind == FP32 else 2)
    near = zeros + 4 * dim  # rows 2 KiB apart would share the same few lines of the L1 cache
    is_far = slot_bytes % 2048 == 0
    steps, lines = size // 4, (size + 63) // 64
    for j in range(0, keys, 16):
        source = k + slot_of(pages, page_at, start + j) * slot_bytes + offset
        ahead, ahead_row, ahead_lines = source, 0, 1
        if j < next_keys:
            ahead = k + slot_of(pages, next_at, next_start + j) * slot_bytes + offset
            ahead_row, ahead_lines = slot_bytes, lines
        key_row = slot_bytes
        if is_far:
            for i in range(16):
                copy_vectors(source + i * slot_bytes, near + i * size, size // 32)
            source, key_row = near, size
        if kind == FP32:
            tile_product(
                0, 0, nv, source, key_row, 4, queries, row_bytes, scores + j * row_bytes,
                row_bytes, 0, steps, ahead, ahead_row, ahead_lines,
            )
        else:
            tile_product(
                1, 0, nv, source, key_row, 4, queries, row_bytes, scores + j * row_bytes,
                row_bytes, 0, steps, ahead, ahead_row, ahead_lines,
            )
    for j in range((keys + 15) // 16 * 16, next_keys, 8):
        slot = slot_of(pages, next_at, next_start + j)
        prefetch_keys(k, v, slot, slot_bytes, offset, size, 8)
    _softmax(nv, kind == BF16, masked, scores, row_bytes, keys, scale, limits, state)
    for j in range(0, keys, 2):
        one = v + slot_of(pages, page_at, start + j) * slot_bytes + offset
        two = one + slot_bytes
        if kind == BF16:
            interleave(one, two if j + 1 < keys else zeros, values + 2 * j * dim, dim // LANES)
        else:
            for i in range(min(2, keys - j)):
                copy_row(one + i * slot_bytes, values + 4 * (j + i) * dim, 4 * dim)
    count = (keys + 1) // 2 if kind == BF16 else keys
    factor = state + 8 * MAX_ROWS
    sums = state + 4 * STATE_ROWS
    covered = count // lines
    for x in range(0, dim, 16):
        ahead, ahead_row, ahead_lines = values, 0, 1
        j = x // 16 * covered
        if j < next_keys:
            ahead = v + slot_of(pages, next_at, next_start + j) * slot_bytes + offset
            ahead_row, ahead_lines = slot_bytes, lines
        if kind == FP32:
            tile_product(
                0, 1, nv, values + 4 * x, 4, 4 * dim, scores, row_bytes, sums + x * row_bytes,
                row_bytes, factor, count, ahead, ahead_row, ahead_lines,
            )
        else:
            tile_product(
                1, 1, nv, values + 4 * x, 4, 4 * dim, scores, row_bytes, sums + x * row_bytes,
                row_bytes, factor, count, ahead, ahead_row, ahead_lines,
            )


@jit
def write_lse(place, top, total):
    """The natural logarithm of a row's softmax denominator; returns what its sums are divided by.

    top: the running maximum, a base-2 logarithm; total: the sum relative to it, 0 without keys.
    """
    if total > 0:
        store_f32(place, np.float32((np.float64(top) + math.log2(total)) * LN2))
        return np.float32(1.0) / total
    store_f32(place, np.float32(-np.inf))
    return np.float32(0.0)


@jit
def finish(state, rows, group, dim, heads, head, token, tokens, out, lse):
    """A state's result: sums [dim, rows] to out [tokens, heads, dim]."""
    sums = state + 4 * STATE_ROWS
    for row in range(tokens * group):
        place = (token + row // group) * heads + head * group + row % group
        ratio = write_lse(
            lse + 4 * place, load_f32(state + 4 * row), load_f32(state + 4 * (row + MAX_ROWS))
        )
        target = out + 4 * place * dim
        for x in range(dim):
            store_f32(target + 4 * x, load_f32(sums + 4 * (x * rows + row)) * ratio)


@jit
def combine_rows(one, two, rows):
    """Merge maximum and sum of a head's state `two` into `one`; factors of both are written."""
    for row in range(rows):
        a, b = load_f32(one + 4 * row), load_f32(two + 4 * row)
        top = max(a, b)
        anchor = top if top > -np.inf else np.float32(0.0)
        keep, take = np.float32(2.0 ** (a - anchor)), np.float32(2.0 ** (b - anchor))
        total = load_f32(one + 4 * (MAX_ROWS + row)) * keep
        total += load_f32(two + 4 * (MAX_ROWS + row)) * take
        store_f32(one + 4 * row, top)
        store_f32(one + 4 * (MAX_ROWS + row), total)
        store_f32(one + 4 * (2 * MAX_ROWS + row), keep)
        store_f32(two + 4 * (2 * MAX_ROWS + row), take)


@jit
def combine(one, two, rows, dim):
    """Merge one head's state `two` into `one`."""
    combine_rows(one, two, rows)
    factors = 4 * 2 * MAX_ROWS
    for x in range(dim):
        at = 4 * (STATE_ROWS + x * rows)
        scaled_add(one + at, one + factors, two + at, two + factors, rows // LANES)


@jit
def clear(out, lse, first, last, heads, dim):
    """Rows without keys: out = 0, lse = -inf."""
    for i in range(first * heads * dim, last * heads * dim):
        store_f32(out + 4 * i, np.float32(0.0))
    for i in range(first * heads, last * heads):
        store_f32(lse + 4 * i, np.float32(-np.inf))

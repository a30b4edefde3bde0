"""One block of query rows against tiles of keys: the inner part of the CPU's attention kernel.

Scores are kept transposed, `[keys, rows]`, 16 query rows to a vector: the softmax never crosses
lanes, K is read in place from its pages and V is re-laid once per tile. bf16 products are summed in
fp32 (AVX512-BF16 where the CPU has it, else on tiles widened to fp32); weights are rounded to bf16
for their product with V, and the softmax's denominator sums the rounded ones.
All arguments are numbers and addresses.
"""

# Argument lists of twenty numbers, one to a line, would hide the code.
# fmt: off
from __future__ import annotations

import math

import numpy as np
from numba import njit

from kernels.row_ir import copy_row
from kernels.spans import PAGE_SIZE
from kernels.vector_ir import (
    LANES,
    fill,
    interleave,
    load_f32,
    load_i32,
    load_u16,
    prefetch,
    scaled_add,
    softmax_column,
    store_f32,
    store_i32,
    tile_product,
)

TILE = 128  # keys; two pages, so that scores and weights of 96 rows stay in the L2 cache
MAX_ROWS = 96  # rows of a block: six vectors
FP32, BF16_DOT, BF16_WIDENED = 0, 1, 2  # how products are made
LN2 = math.log(2.0)
MAX_HEADS = 48  # KV heads that one pass over a tile serves
CHUNK_SUMS = 768 * 64  # fp32 sums of those heads together: 192 KiB of the L2 cache
STATE_ROWS = 3 * MAX_ROWS  # running maximum, sum and factor in front of a state's sums
STATE_FLOATS = MAX_HEADS * STATE_ROWS + CHUNK_SUMS

jit = njit(cache=True, error_model="numpy")


@jit
def scratch_floats(dim: int) -> int:
    """fp32 numbers that one thread works in: three states, limits, queries, scores, K and V."""
    return 3 * STATE_FLOATS + MAX_ROWS + CHUNK_SUMS + MAX_ROWS * TILE + (2 * TILE + 1) * dim


@jit
def head_floats(dim, rows):
    """fp32 numbers of one head's running state: maximum, sum, factor, then sums [dim, rows]."""
    return STATE_ROWS + dim * rows


@jit
def _key_products(
    nv, pairs, a, a_row, b, row, c, steps, ahead, ahead_row, lines
):
    """Scores of 16 keys, [16, rows]: an accumulator block fits the registers whatever nv is."""
    if nv == 1:
        for i in range(0, 16, 16):
            x, y = a + i * a_row, c + i * row
            if pairs:
                tile_product(
                    16, 1, 1, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
            else:
                tile_product(
                    16, 1, 0, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
    elif nv == 2:
        for i in range(0, 16, 8):
            x, y = a + i * a_row, c + i * row
            if pairs:
                tile_product(
                    8, 2, 1, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
            else:
                tile_product(
                    8, 2, 0, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
    elif nv == 3:
        for i in range(0, 16, 8):
            x, y = a + i * a_row, c + i * row
            if pairs:
                tile_product(
                    8, 3, 1, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
            else:
                tile_product(
                    8, 3, 0, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
    elif nv == 4:
        for i in range(0, 16, 4):
            x, y = a + i * a_row, c + i * row
            if pairs:
                tile_product(
                    4, 4, 1, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
            else:
                tile_product(
                    4, 4, 0, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
    elif nv == 5:
        for i in range(0, 16, 4):
            x, y = a + i * a_row, c + i * row
            if pairs:
                tile_product(
                    4, 5, 1, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
            else:
                tile_product(
                    4, 5, 0, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
    else:
        for i in range(0, 16, 4):
            x, y = a + i * a_row, c + i * row
            if pairs:
                tile_product(
                    4, 6, 1, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )
            else:
                tile_product(
                    4, 6, 0, 0, x, a_row, 4, b, row, y, row, c, steps, ahead, ahead_row, lines
                )


@jit
def _value_products(
    nv, pairs, a, a_step, b, row, c, factor, steps, ahead, ahead_row, lines
):
    """16 dimensions of the sums, [16, rows]: scaled by factor, plus V^T times the weights."""
    if nv == 1:
        for i in range(0, 16, 16):
            x, y = a + 4 * i, c + i * row
            if pairs:
                tile_product(
                    16, 1, 1, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
            else:
                tile_product(
                    16, 1, 0, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
    elif nv == 2:
        for i in range(0, 16, 8):
            x, y = a + 4 * i, c + i * row
            if pairs:
                tile_product(
                    8, 2, 1, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
            else:
                tile_product(
                    8, 2, 0, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
    elif nv == 3:
        for i in range(0, 16, 8):
            x, y = a + 4 * i, c + i * row
            if pairs:
                tile_product(
                    8, 3, 1, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
            else:
                tile_product(
                    8, 3, 0, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
    elif nv == 4:
        for i in range(0, 16, 4):
            x, y = a + 4 * i, c + i * row
            if pairs:
                tile_product(
                    4, 4, 1, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
            else:
                tile_product(
                    4, 4, 0, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
    elif nv == 5:
        for i in range(0, 16, 4):
            x, y = a + 4 * i, c + i * row
            if pairs:
                tile_product(
                    4, 5, 1, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
            else:
                tile_product(
                    4, 5, 0, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
    else:
        for i in range(0, 16, 4):
            x, y = a + 4 * i, c + i * row
            if pairs:
                tile_product(
                    4, 6, 1, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )
            else:
                tile_product(
                    4, 6, 0, 1, x, 4, a_step, b, row, y, row, factor, steps,
                    ahead, ahead_row, lines,
                )


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
def _pack_queries(kind, q, token, tokens, q_row, head, group, dim, rows, out):
    """out [steps, rows]: 32 bits of every row per step, rows padded with zeros."""
    width = 4 if kind == FP32 else 2
    steps = dim // 2 if kind == BF16_DOT else dim
    for step in range(steps):
        for row in range(tokens * group, rows):
            store_i32(out + 4 * (step * rows + row), np.int32(0))
    for row in range(tokens * group):
        source = q + (token + row // group) * q_row + (head * group + row % group) * dim * width
        for step in range(steps):
            if kind == BF16_WIDENED:
                bits = np.int32(np.uint32(load_u16(source + 2 * step)) << np.uint32(16))
            else:
                bits = load_i32(source + 4 * step)
            store_i32(out + 4 * (step * rows + row), bits)


@jit
def _widen(source, out, dim):
    for i in range(dim):
        bits = np.int32(np.uint32(load_u16(source + 2 * i)) << np.uint32(16))
        store_i32(out + 4 * i, bits)


@jit
def _slot(pages, page_at, key):
    page = np.int64(load_i32(pages + 4 * (page_at + key // PAGE_SIZE)))
    return page * PAGE_SIZE + key % PAGE_SIZE


@jit
def _prefetch(k, v, slot, slot_bytes, offset, size):
    """Ask for `size` bytes of the rows of eight keys."""
    for i in range(8):
        place = (slot + i) * slot_bytes + offset
        prefetch(k + place, size)
        prefetch(v + place, size)


@jit
def _tile(
    kind, k, v, slot_bytes, offset, dim, nv, scale, pages, page_at, start, keys, next_at,
    next_start, next_keys, masked, limits, queries, scores, values, keys_wide, zeros, state,
):
    """One tile of keys for one KV head: scores, weights, weighted sums of V into its state.

    Meanwhile the next tile's rows are asked for, one cache line per step of the products.
    """
    rows = nv * LANES
    row_bytes = 4 * rows
    pairs = kind == BF16_DOT
    size = dim * (4 if kind == FP32 else 2)
    steps = dim // 2 if pairs else dim
    lines = (size + 63) // 64
    sums = state + 4 * STATE_ROWS
    for j in range(0, keys, 16):
        source, stride = k + _slot(pages, page_at, start + j) * slot_bytes + offset, slot_bytes
        ahead, ahead_row, ahead_lines = source, 0, 1
        if j < next_keys:
            ahead = k + _slot(pages, next_at, next_start + j) * slot_bytes + offset
            ahead_row, ahead_lines = slot_bytes, lines
        if kind == BF16_WIDENED:
            for i in range(16):
                _widen(source + i * slot_bytes, keys_wide + 4 * i * dim, dim)
            source, stride = keys_wide, 4 * dim
        _key_products(
            nv, pairs, source, stride, queries, row_bytes, scores + j * row_bytes, steps,
            ahead, ahead_row, ahead_lines,
        )
    for j in range((keys + 15) // 16 * 16, next_keys, 8):
        _prefetch(k, v, _slot(pages, next_at, next_start + j), slot_bytes, offset, size)
    _softmax(nv, pairs, masked, scores, row_bytes, keys, scale, limits, state)
    for j in range(0, keys, 2):
        one = v + _slot(pages, page_at, start + j) * slot_bytes + offset
        two = one + slot_bytes
        if pairs:
            interleave(one, two if j + 1 < keys else zeros, values + 2 * j * dim, dim // LANES)
        else:
            for i in range(min(2, keys - j)):
                source, out = one + i * slot_bytes, values + 4 * (j + i) * dim
                if kind == FP32:
                    copy_row(source, out, 4 * dim)
                else:
                    _widen(source, out, dim)
    count = (keys + 1) // 2 if pairs else keys
    factor = state + 8 * MAX_ROWS
    covered = count // lines
    for x in range(0, dim, 16):
        ahead, ahead_row, ahead_lines = values, 0, 1
        j = x // 16 * covered
        if j < next_keys:
            ahead = v + _slot(pages, next_at, next_start + j) * slot_bytes + offset
            ahead_row, ahead_lines = slot_bytes, lines
        _value_products(
            nv, pairs, values + 4 * x, 4 * dim, scores, row_bytes, sums + x * row_bytes, factor,
            count, ahead, ahead_row, ahead_lines,
        )


@jit
def tile_at(segments, span, tile):
    """Where a tile of a span lies: its page list, first token there, tokens, keys before it.

    A tile never crosses a segment's end, since the next segment starts on another page.
    """
    before = 0
    for i in range(segments.shape[1]):
        tokens = segments[span, i, 1]
        count = (tokens + TILE - 1) // TILE
        if tile < count:
            return segments[span, i, 0], tile * TILE, min(TILE, tokens - tile * TILE), before + (
                tile * TILE
            )
        tile -= count
        before += tokens
    return 0, 0, 0, before


@jit
def count_tiles(segments, span, seen):
    """Tiles that hold the first `seen` keys of a span, all of them if it has fewer."""
    count = 0
    for i in range(segments.shape[1]):
        tokens = segments[span, i, 1]
        count += (max(0, min(tokens, seen)) + TILE - 1) // TILE
        seen -= tokens
    return count


@jit
def run_tiles(
    kind, q, q_row, k, v, kv_heads, dim, group, scale, head, heads, token, tokens, segments, span,
    base, pages, first_tile, last_tile, primed, next_span, state, work,
):
    """Tiles [first, last) of one block of rows and some KV heads, into fresh states.

    next_span: the span whose first tile comes after the last, or -1; primed: the first was asked
    for already.
    """
    nv = (tokens * group + LANES - 1) // LANES
    rows = nv * LANES
    width = 4 if kind == FP32 else 2
    slot_bytes, head_bytes = kv_heads * dim * width, dim * width
    limits = work
    queries = limits + 4 * MAX_ROWS
    scores = queries + 4 * CHUNK_SUMS
    values = scores + 4 * MAX_ROWS * TILE
    keys_wide = values + 4 * TILE * dim
    zeros = keys_wide + 4 * TILE * dim
    seen = base + token + tokens
    at, start, keys, before = tile_at(segments, span, first_tile)
    keys = min(keys, seen - before)
    if not primed:
        for j in range(0, keys, 8):
            slot = _slot(pages, at, start + j)
            _prefetch(k, v, slot, slot_bytes, head * head_bytes, heads * head_bytes)
    state_bytes, query_bytes = 4 * head_floats(dim, rows), 4 * dim * rows
    for i in range(heads):
        _pack_queries(
            kind, q, token, tokens, q_row, head + i, group, dim, rows, queries + i * query_bytes
        )
        fill(state + i * state_bytes, np.float32(-np.inf), MAX_ROWS)
        fill(state + i * state_bytes + 4 * MAX_ROWS, np.float32(0.0), 2 * MAX_ROWS + dim * rows)
    fill(zeros, np.float32(0.0), dim)
    for tile in range(first_tile, last_tile):
        masked = before + keys > base + token + 1
        if masked:
            for row in range(rows):
                limit = base + token + min(row // group, tokens - 1) + 1 - before
                store_i32(limits + 4 * row, np.int32(min(max(limit, 0), TILE)))
        next_at, next_start, next_keys, next_before = 0, 0, 0, 0
        if tile + 1 < last_tile:
            next_at, next_start, next_keys, next_before = tile_at(segments, span, tile + 1)
            next_keys = min(next_keys, seen - next_before)
        elif next_span >= 0:
            next_at, next_start, next_keys, next_before = tile_at(segments, next_span, 0)
        for i in range(heads):
            _tile(
                kind, k, v, slot_bytes, (head + i) * head_bytes, dim, nv, scale, pages, at,
                start, keys, next_at, next_start, next_keys, masked, limits,
                queries + i * query_bytes, scores, values, keys_wide, zeros,
                state + i * state_bytes,
            )
        at, start, keys, before = next_at, next_start, next_keys, next_before


@jit
def finish(state, rows, group, dim, heads, head, token, tokens, out, lse):
    sums = state + 4 * STATE_ROWS
    for row in range(tokens * group):
        total = load_f32(state + 4 * (row + MAX_ROWS))
        place = (token + row // group) * heads + head * group + row % group
        if total > 0:
            ratio = np.float32(1.0) / total
            level = (np.float64(load_f32(state + 4 * row)) + math.log2(total)) * LN2
            store_f32(lse + 4 * place, np.float32(level))
        else:
            ratio = np.float32(0.0)
            store_f32(lse + 4 * place, np.float32(-np.inf))
        target = out + 4 * place * dim
        for x in range(dim):
            store_f32(target + 4 * x, load_f32(sums + 4 * (x * rows + row)) * ratio)


@jit
def combine(one, two, rows, dim):
    """Merge one head's state `two` into `one`."""
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
    factors = 4 * 2 * MAX_ROWS
    for x in range(dim):
        at = 4 * (STATE_ROWS + x * rows)
        scaled_add(one + at, one + factors, two + at, two + factors, rows // LANES)


@jit
def clear(out, lse, first, last, heads, dim):
    for i in range(first * heads * dim, last * heads * dim):
        store_f32(out + 4 * i, np.float32(0.0))
    for i in range(first * heads, last * heads):
        store_f32(lse + 4 * i, np.float32(-np.inf))

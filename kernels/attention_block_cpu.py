"""A block of query rows and some KV heads against the tiles of a span, one after another.

A tile never crosses a segment's end, since the next segment starts on another page; the running
softmax goes on across both. Blocks of few rows and of many have their own tiles and layouts.
"""

# fmt: off
from __future__ import annotations

import numpy as np

from kernels.attention_few_tile import (
    FEW_ROWS,
    FEW_TILE,
    few_combine,
    few_finish,
    few_pack_queries,
    few_tile,
)
from kernels.attention_tile import (
    FP32,
    MAX_ROWS,
    TILE,
    begin,
    combine,
    finish,
    head_floats,
    jit,
    pack_queries,
    prefetch_keys,
    slot_of,
    tile,
)
from kernels.vector_ir import LANES, fill, store_i32

MAX_HEADS = 8  # KV heads that one pass over a tile serves: states of more would leave the cache
CHUNK_SUMS = 768 * 64  # fp32 sums of those heads together: 192 KiB of the L2 cache
STATE_FLOATS = MAX_HEADS * (3 * MAX_ROWS) + CHUNK_SUMS


@jit
def scratch_floats(dim: int) -> int:
    """fp32 numbers that one thread works in: three states, limits, queries, scores, V and K."""
    return 3 * STATE_FLOATS + MAX_ROWS + CHUNK_SUMS + MAX_ROWS * TILE + (TILE + 17) * dim


@jit
def block_tokens(tokens, group):
    """Tokens of a block of rows: as few blocks as MAX_ROWS allows, of equal size."""
    blocks = (tokens + MAX_ROWS // group - 1) // (MAX_ROWS // group)
    return (tokens + blocks - 1) // blocks


@jit
def block_rows(tokens, group):
    """Rows of a block as its states count them: few as they are, many in whole vectors."""
    rows = tokens * group
    return rows if rows <= FEW_ROWS else (rows + LANES - 1) // LANES * LANES


@jit
def tile_cost(rows):
    """Time of a tile of one KV head, in units of no meaning but to each other."""
    return 5 + rows if rows <= FEW_ROWS else 2 * (rows + LANES)


@jit
def head_chunk(kv_heads, dim, rows, narrow):
    """KV heads that share a pass over the keys, so that pages are read in one piece."""
    return 1 if narrow else max(1, min(kv_heads, MAX_HEADS, CHUNK_SUMS // (dim * rows)))


@jit
def tile_at(segments, span, index, rows):
    """Where a tile of a span lies: its page list, first token there, tokens, keys before it."""
    size = FEW_TILE if rows <= FEW_ROWS else TILE
    before = 0
    for i in range(segments.shape[1]):
        tokens = segments[span, i, 1]
        count = (tokens + size - 1) // size
        if index < count:
            start = index * size
            return segments[span, i, 0], start, min(size, tokens - start), before + start
        index -= count
        before += tokens
    return 0, 0, 0, before


@jit
def count_tiles(segments, span, seen, rows):
    """Tiles that hold the first `seen` keys of a span, all of them if it has fewer."""
    size = FEW_TILE if rows <= FEW_ROWS else TILE
    count = 0
    for i in range(segments.shape[1]):
        tokens = segments[span, i, 1]
        count += (max(0, min(tokens, seen)) + size - 1) // size
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
    rows = block_rows(tokens, group)
    few = rows <= FEW_ROWS
    width = 4 if kind == FP32 else 2
    slot_bytes, head_bytes = kv_heads * dim * width, dim * width
    limits = work
    queries = limits + 4 * MAX_ROWS
    scores = queries + 4 * CHUNK_SUMS
    values = scores + 4 * MAX_ROWS * TILE
    zeros = values + 4 * TILE * dim
    seen = base + token + tokens
    at, start, keys, before = tile_at(segments, span, first_tile, rows)
    keys = min(keys, seen - before)
    if not primed:
        for j in range(0, keys, 8):
            slot = slot_of(pages, at, start + j)
            prefetch_keys(k, v, slot, slot_bytes, head * head_bytes, heads * head_bytes, 8)
    state_bytes, query_bytes = 4 * head_floats(dim, rows), 4 * dim * rows
    for i in range(heads):
        place = queries + i * query_bytes
        if few:
            few_pack_queries(kind, q, token, tokens, q_row, head + i, group, dim, place)
        else:
            pack_queries(kind, q, token, tokens, q_row, head + i, group, dim, rows, place)
        begin(state + i * state_bytes, dim, rows)
    fill(zeros, np.float32(0.0), dim)
    for index in range(first_tile, last_tile):
        masked = before + keys > base + token + 1
        if masked or few:
            for row in range(rows):
                limit = base + token + min(row // group, tokens - 1) + 1 - before
                store_i32(limits + 4 * row, np.int32(min(max(limit, 0), TILE)))
        next_at, next_start, next_keys, next_before = 0, 0, 0, 0
        if index + 1 < last_tile:
            next_at, next_start, next_keys, next_before = tile_at(segments, span, index + 1, rows)
            next_keys = min(next_keys, seen - next_before)
        elif next_span >= 0:
            next_at, next_start, next_keys, next_before = tile_at(segments, next_span, 0, rows)
        if few:
            place = slot_of(pages, at, start) * slot_bytes + head * head_bytes
            next_place = place
            if next_keys > 0:
                next_place = slot_of(pages, next_at, next_start) * slot_bytes + head * head_bytes
            for i in range(heads):
                few_tile(
                    kind, k + place, v + place, slot_bytes, dim, rows, scale, keys, k + next_place,
                    v + next_place, heads * head_bytes, i * next_keys // heads,
                    (i + 1) * next_keys // heads, limits, queries + i * query_bytes, scores, zeros,
                    state + i * state_bytes,
                )
                place += head_bytes
        else:
            for i in range(heads):
                tile(
                    kind, k, v, slot_bytes, (head + i) * head_bytes, dim, rows // LANES, scale,
                    pages, at, start, keys, next_at, next_start, next_keys, masked, limits,
                    queries + i * query_bytes, scores, values, zeros, state + i * state_bytes,
                )
        at, start, keys, before = next_at, next_start, next_keys, next_before


@jit
def finish_block(state, rows, group, dim, heads, head, token, tokens, out, lse):
    """The result of one head of a block."""
    if rows <= FEW_ROWS:
        few_finish(state, group, dim, heads, head, token, tokens, out, lse)
    else:
        finish(state, rows, group, dim, heads, head, token, tokens, out, lse)


@jit
def combine_blocks(one, two, rows, dim):
    """Merge one head's state `two` into `one`."""
    if rows <= FEW_ROWS:
        few_combine(one, two, rows, dim)
    else:
        combine(one, two, rows, dim)

"""A few query rows against a page of keys, with 16 keys to a vector: decoding reads this way.

With one vector of 16 rows most lanes would be idle; here the work is in proportion to the rows, and
K and V are read once from their pages for up to four rows. Arithmetic as in `attention_tile`.
"""

# fmt: off
from __future__ import annotations

from kernels.attention_tile import (
    BF16,
    FP32,
    MAX_ROWS,
    STATE_ROWS,
    combine_rows,
    jit,
    prefetch_keys,
    write_lse,
)
from kernels.key_ir import MAX_BLOCK, key_scores, softmax_row, value_sums
from kernels.row_ir import copy_row
from kernels.spans import PAGE_SIZE
from kernels.vector_ir import load_f32, load_i32, store_f32

FEW_ROWS = 8  # rows up to which this is the faster way
FEW_TILE = PAGE_SIZE  # keys


@jit
def few_pack_queries(kind, q, token, tokens, q_row, head, group, dim, out):
    """out [rows, dim]: the rows of one KV head, one after another."""
    width = 4 if kind == FP32 else 2
    size = group * dim * width
    for i in range(tokens):
        copy_row(q + (token + i) * q_row + head * size, out + i * size, size)


@jit
def few_tile(
    kind, k, v, slot_bytes, dim, rows, scale, keys, next_k, next_v, next_bytes, first, last, limits,
    queries, scores, zeros, state,
):
    """One page of keys for one KV head: scores, weights, weighted sums of V into its state.

    k, v: the first key's place in its page; meanwhile next_bytes of the keys [first, last) of the
    next page, at next_k and next_v, are asked for; limits int32: how many keys each row sees.
    """
    size = dim * (4 if kind == FP32 else 2)
    score_row = 4 * FEW_TILE
    step = (16 * (last - first) + keys - 1) // keys
    for j in range(0, keys, 16):
        asked = min(last, first + step)
        prefetch_keys(next_k, next_v, first, slot_bytes, 0, next_bytes, asked - first)
        first = asked
        for r in range(0, rows, MAX_BLOCK):
            block, source = min(MAX_BLOCK, rows - r), k + j * slot_bytes
            out = scores + r * score_row + 4 * j
            if kind == FP32:
                key_scores(
                    0, block, source, slot_bytes, queries + r * size, size, size // 4, out,
                    score_row,
                )
            else:
                key_scores(
                    1, block, source, slot_bytes, queries + r * size, size, size // 4, out,
                    score_row,
                )
    for r in range(rows):
        seen = min(keys, load_i32(limits + 4 * r))
        top, row = state + 4 * r, scores + r * score_row
        if kind == FP32:
            softmax_row(0, row, keys, seen, scale, top, top + 4 * MAX_ROWS, top + 8 * MAX_ROWS)
        else:
            softmax_row(1, row, keys, seen, scale, top, top + 4 * MAX_ROWS, top + 8 * MAX_ROWS)
    for r in range(0, rows, MAX_BLOCK):
        block, weights = min(MAX_BLOCK, rows - r), scores + r * score_row
        sums, factors = state + 4 * (STATE_ROWS + r * dim), state + 4 * (2 * MAX_ROWS + r)
        wide = dim // 64 * 64
        for x in range(0, wide, 64):
            source = v + x * size // dim
            if kind == BF16:
                value_sums(
                    1, 4, block, weights, score_row, source, slot_bytes, zeros, keys, sums + 4 * x,
                    4 * dim, factors,
                )
            else:
                value_sums(
                    0, 4, block, weights, score_row, source, slot_bytes, zeros, keys, sums + 4 * x,
                    4 * dim, factors,
                )
        for x in range(wide, dim, 16):
            source = v + x * size // dim
            if kind == BF16:
                value_sums(
                    1, 1, block, weights, score_row, source, slot_bytes, zeros, keys, sums + 4 * x,
                    4 * dim, factors,
                )
            else:
                value_sums(
                    0, 1, block, weights, score_row, source, slot_bytes, zeros, keys, sums + 4 * x,
                    4 * dim, factors,
                )


@jit
def few_finish(state, group, dim, heads, head, token, tokens, out, lse):
    """A state's result: sums [rows, dim] to out [tokens, heads, dim]."""
    for row in range(tokens * group):
        place = (token + row // group) * heads + head * group + row % group
        ratio = write_lse(
            lse + 4 * place, load_f32(state + 4 * row), load_f32(state + 4 * (row + MAX_ROWS))
        )
        sums, target = state + 4 * (STATE_ROWS + row * dim), out + 4 * place * dim
        for x in range(dim):
            store_f32(target + 4 * x, load_f32(sums + 4 * x) * ratio)


@jit
def few_combine(one, two, rows, dim):
    """Merge one head's state `two` into `one`."""
    combine_rows(one, two, rows)
    for row in range(rows):
        keep = load_f32(one + 4 * (2 * MAX_ROWS + row))
        take = load_f32(two + 4 * (2 * MAX_ROWS + row))
        for x in range(STATE_ROWS + row * dim, STATE_ROWS + (row + 1) * dim):
            total = load_f32(one + 4 * x) * keep + load_f32(two + 4 * x) * take
            store_f32(one + 4 * x, total)

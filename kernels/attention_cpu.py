"""Deals the tiles of all spans of a step out to the threads in equal shares, and joins the pieces.

An item is a block of a span's rows and some KV heads. A thread takes the tiles whose costs lie in
its share, whatever items they belong to; the pieces of an item cut between threads are merged at
the end, exactly.
"""

# Argument lists of twenty numbers, one to a line, would hide the code.
# fmt: off
from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # numba exports it at run time

from kernels.attention_block_cpu import (
    STATE_FLOATS,
    block_rows,
    block_tokens,
    combine_blocks,
    count_tiles,
    finish_block,
    head_chunk,
    run_tiles,
    scratch_floats,
    tile_cost,
)
from kernels.attention_tile import clear, head_floats, jit
from kernels.parallel import Worker, gomp_parallel, team_size, thread_number
from kernels.rows_cpu import word
from kernels.vector_ir import int64_pointer, load_f64, store_f64

PART_WORDS = 7  # of a piece: item, KV head, heads, token, tokens, rows, state


@jit
def _finish_part(part, sums, dim, group, heads, num_rows, out, lse):
    rows, first = part[5], part[6] * num_rows * heads
    for i in range(part[2]):
        finish_block(
            sums + 4 * i * head_floats(dim, rows), rows, group, dim, heads, part[1] + i,
            part[3], part[4], out + 4 * first * dim, lse + 4 * first,
        )


@jit
def _share(
    kind, q, q_row, k, v, heads, kv_heads, dim, scale, spans, segments, pages, num_rows, out, lse,
    narrow, thread, threads, low, high, home, parts,
):
    """One thread's share: the tiles whose costs lie in [low, high); cut items go to `parts`.

    Rows that see no key are cleared by the threads in turn.
    """
    group = heads // kv_heads
    work = home + 12 * STATE_FLOATS
    at, item, primed = 0, 0, -1
    for s in range(spans.shape[0]):
        start, stop, base, state = spans[s, 0], spans[s, 1], spans[s, 2], spans[s, 3]
        block = block_tokens(stop - start, group)
        for token in range(start, stop, block):
            tokens = min(block, stop - token)
            rows = block_rows(tokens, group)
            tiles = count_tiles(segments, s, base + token + tokens, rows)
            if tiles == 0:
                if s % threads == thread:
                    first = state * num_rows + token
                    clear(out, lse, first, first + tokens, heads, dim)
                continue
            chunk = head_chunk(kv_heads, dim, rows, narrow)
            for head in range(0, kv_heads, chunk):
                count = min(chunk, kv_heads - head)
                weight = count * tile_cost(rows)
                first = min(max((low - at + weight - 1) // weight, 0), tiles)
                last = min(max((high - at + weight - 1) // weight, 0), tiles)
                at += tiles * weight
                item += 1
                if first >= last:
                    continue
                place = 2
                if first > 0:
                    place = 0
                elif last < tiles:
                    place = 1
                sums = home + 4 * place * STATE_FLOATS
                was_primed = primed == s and first == 0
                next_span = -1
                ends = count == kv_heads and token + tokens == stop and last == tiles
                if ends and at < high and s + 1 < spans.shape[0]:
                    primed = next_span = s + 1
                run_tiles(
                    kind, q, q_row, k, v, kv_heads, dim, group, scale, head, count, token, tokens,
                    segments, s, base, pages, first, last, was_primed, next_span, sums, work,
                )
                part = parts[place]
                part[0], part[1], part[2] = item, head, count
                part[3], part[4], part[5], part[6] = token, tokens, rows, state
                if place == 2:
                    _finish_part(part, sums, dim, group, heads, num_rows, out, lse)


@jit
def _merge_parts(parts, scratch, size, dim, group, heads, num_rows, out, lse):
    """Join the pieces of items that were cut between threads; pieces come in order."""
    whole, place = 0, 0
    for index in range(2 * parts.shape[0]):
        part = parts[index // 2, index % 2]
        if part[0] == 0:
            continue
        sums = scratch + 4 * ((index // 2) * size + (index % 2) * STATE_FLOATS)
        kept = parts[whole // 2, whole % 2]
        if place != 0 and kept[0] == part[0]:
            step = 4 * head_floats(dim, part[5])
            for i in range(part[2]):
                combine_blocks(place + i * step, sums + i * step, part[5], dim)
            continue
        if place != 0:
            _finish_part(kept, place, dim, group, heads, num_rows, out, lse)
        whole, place = index, sums
    if place != 0:
        _finish_part(parts[whole // 2, whole % 2], place, dim, group, heads, num_rows, out, lse)


def _part(a):
    cost, size, count, depth = word(a, 1), word(a, 2), word(a, 3), word(a, 21)
    t, threads = np.int64(thread_number()), np.int64(team_size())
    _share(
        word(a, 6), word(a, 7), word(a, 8), word(a, 9), word(a, 10), word(a, 11), word(a, 12),
        word(a, 13), np.float32(load_f64(a + 32)), carray(int64_pointer(word(a, 14)), (count, 4)),
        carray(int64_pointer(word(a, 20)), (count, depth, 2)), word(a, 15), word(a, 22),
        word(a, 16), word(a, 17), word(a, 18) != 0, t, threads,
        t * cost // threads, (t + 1) * cost // threads, word(a, 19) + 4 * t * size,
        carray(int64_pointer(word(a, 5) + t * 8 * 3 * PART_WORDS), (3, PART_WORDS)),
    )


PART = Worker(_part)


@jit
def run_spans(
    kind: Any, q, q_row, k, v, heads, kv_heads, dim, slope, spans, segments, pages, num_rows,
    num_states, out, lse, scratch, threads, part,
):
    """All spans, as kernels.spans has them; their results to out and lse, [state, row].

    q, k, v, pages (int32), out, lse, scratch, part: addresses; q_row bytes; slope: the scale times
    log2(e). Returns the first span whose rows or state lie outside, before anything is written, or
    -1.
    """
    group = heads // kv_heads
    cost, tiles = 0, 0
    for s in range(spans.shape[0]):
        start, stop, base, state = spans[s, 0], spans[s, 1], spans[s, 2], spans[s, 3]
        if not (0 <= start < stop <= num_rows and 0 <= state < num_states):
            return s
        block = block_tokens(stop - start, group)
        for token in range(start, stop, block):
            tokens = min(block, stop - token)
            rows = block_rows(tokens, group)
            count = count_tiles(segments, s, base + token + tokens, rows)
            tiles += count
            cost += count * kv_heads * tile_cost(rows)
    narrow = tiles < 4 * threads
    size = scratch_floats(dim)
    parts = np.zeros((threads, 3, PART_WORDS), np.int64)
    if threads == 1:
        _share(
            kind, q, q_row, k, v, heads, kv_heads, dim, np.float32(slope), spans, segments, pages,
            num_rows, out, lse, narrow, 0, 1, 0, cost, scratch, parts[0],
        )
        return -1
    a = np.array((
        threads, cost, size, spans.shape[0], 0, np.int64(parts.ctypes.data), kind, q, q_row,
        k, v, heads, kv_heads, dim, np.int64(spans.ctypes.data), pages, out, lse,
        np.int64(narrow), scratch, np.int64(segments.ctypes.data), segments.shape[1], num_rows,
    ))
    store_f64(a.ctypes.data + 32, slope)
    gomp_parallel(part, a.ctypes.data, threads, 0)
    a[0] = 0  # numba frees an array after its last use: not before the call ends
    _merge_parts(parts, scratch, size, dim, group, heads, num_rows, out, lse)
    return -1

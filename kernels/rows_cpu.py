"""Numba kernels over rows: norms, activation, merge, rotary embedding and cache writes.

Arguments are addresses (int64) and strides in bytes, so that a call costs little more than its
work; the public functions check shapes. Small calls stay on one thread.
"""

# Argument lists of twenty numbers, one to a line, would hide the code.
# fmt: off
from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from kernels.parallel import Worker, gomp_parallel, team_size, thread_number
from kernels.row_ir import (
    copy_row,
    rms_norm_row,
    rotate_row,
    silu_mul_row,
    weighted_sum,
)
from kernels.vector_ir import load_f32, load_f64, load_i64, store_f64

_jit = njit(cache=True, error_model="numpy")
SERIAL_BYTES = 1 << 16  # below this a second thread costs more than it does


@_jit
def word(address, index):
    """Entry of an int64 array."""
    return load_i64(address + 8 * index)


@_jit
def _share(rows: int, part: int, parts: int) -> tuple[int, int]:
    return part * rows // parts, (part + 1) * rows // parts


@_jit
def _norm(bf16, adds, x, x_row, residual, weight, out, first, last, dim, eps):
    row = (2 if bf16 else 4) * dim
    inverse = np.float32(1.0 / dim)
    for i in range(first, last):
        a, r, o = x + i * x_row, residual + i * row, out + i * row
        if bf16:
            if adds:
                rms_norm_row(1, 1, a, r, weight, o, dim // 16, inverse, eps)
            else:
                rms_norm_row(1, 0, a, r, weight, o, dim // 16, inverse, eps)
        elif adds:
            rms_norm_row(0, 1, a, r, weight, o, dim // 16, inverse, eps)
        else:
            rms_norm_row(0, 0, a, r, weight, o, dim // 16, inverse, eps)


def _norm_part(a):
    first, last = _share(word(a, 0), thread_number(), team_size())
    eps = load_f64(a + 16)
    _norm(
        word(a, 3), word(a, 4), word(a, 5), word(a, 6), word(a, 7), word(a, 8), word(a, 9), first,
        last, word(a, 10), eps,
    )


NORM = Worker(_norm_part)


@_jit
def norm_rows(
    bf16: Any, adds, x, x_row, residual, weight, out, rows, dim, eps, threads, part
):
    """RMS norm of every row; adds: of x + residual, which is written to residual."""
    if threads == 1 or rows * dim * 2 < SERIAL_BYTES:
        _norm(bf16, adds, x, x_row, residual, weight, out, 0, rows, dim, eps)
    else:
        a = np.array(
            (rows, threads, 0, np.int64(bf16), np.int64(adds), x, x_row, residual, weight, out, dim)
        )
        store_f64(a.ctypes.data + 16, eps)
        gomp_parallel(part, a.ctypes.data, threads, 0)
        a[0] = 0  # numba frees an array after its last use: not before the call ends


@_jit
def _silu(bf16, x, x_row, out, first, last, dim):
    size = 2 if bf16 else 4
    for i in range(first, last):
        gate, o = x + i * x_row, out + i * size * dim
        if bf16:
            silu_mul_row(1, gate, gate + size * dim, o, dim // 16)
        else:
            silu_mul_row(0, gate, gate + size * dim, o, dim // 16)


def _silu_part(a):
    first, last = _share(word(a, 0), thread_number(), team_size())
    _silu(word(a, 3), word(a, 4), word(a, 5), word(a, 6), first, last, word(a, 7))


SILU = Worker(_silu_part)


@_jit
def silu_rows(bf16: Any, x, x_row, out, rows, dim, threads, part):
    """cast(silu(gate)) * up; dim is that of the output."""
    if threads == 1 or rows * dim * 2 < SERIAL_BYTES // 4:
        _silu(bf16, x, x_row, out, 0, rows, dim)
    else:
        a = np.array((rows, threads, 0, np.int64(bf16), x, x_row, out, dim))
        gomp_parallel(part, a.ctypes.data, threads, 0)
        a[0] = 0  # numba frees an array after its last use: not before the call ends


@_jit
def _merge(bf16, outs, lses, states, result, rows, first, last, dim):
    """Rows [first, last) of [states, rows]; states without keys are left out, and not read."""
    places, weights = np.empty(states, np.int64), np.empty(states, np.float32)
    for i in range(first, last):
        top = np.float32(-np.inf)
        for p in range(states):
            top = max(top, load_f32(lses + 4 * (p * rows + i)))
        count, total = 0, 0.0
        for p in range(states):
            level = load_f32(lses + 4 * (p * rows + i))
            if level > -np.inf:
                weight = math.exp(level - top)
                places[count] = outs + 4 * (p * rows + i) * dim
                weights[count] = weight
                total += weight
                count += 1
        for p in range(count):
            weights[p] /= total
        if bf16:
            weighted_sum(
                1, places.ctypes.data, weights.ctypes.data, count, result + 2 * i * dim, dim // 16
            )
        else:
            weighted_sum(
                0, places.ctypes.data, weights.ctypes.data, count, result + 4 * i * dim, dim // 16
            )
    places[0] = 0  # numba frees arrays after their last use: not before the rows are read
    weights[0] = 0


def _merge_part(a):
    first, last = _share(word(a, 0), thread_number(), team_size())
    _merge(
        word(a, 3), word(a, 4), word(a, 5), word(a, 6), word(a, 7), word(a, 0), first, last,
        word(a, 8),
    )


MERGE = Worker(_merge_part)


@_jit
def merge_rows(bf16: Any, outs, lses, states, result, rows, dim, threads, part):
    """Merge the states of each of `rows` (tokens * heads) rows: [states, rows, dim] -> [rows]."""
    if threads == 1 or rows * dim * states * 2 < SERIAL_BYTES:
        _merge(bf16, outs, lses, states, result, rows, 0, rows, dim)
    else:
        a = np.array((rows, threads, 0, np.int64(bf16), outs, lses, states, result, dim))
        gomp_parallel(part, a.ctypes.data, threads, 0)
        a[0] = 0  # numba frees an array after its last use: not before the call ends


@_jit
def _rotate(bf16, x, cos, out, dim):
    half = dim // 2
    sin = cos + 4 * half
    if bf16:
        if half % 16 == 0:
            rotate_row(1, 16, x, cos, sin, out, half, half // 16)
        else:
            rotate_row(1, 8, x, cos, sin, out, half, half // 8)
    elif half % 16 == 0:
        rotate_row(0, 16, x, cos, sin, out, half, half // 16)
    else:
        rotate_row(0, 8, x, cos, sin, out, half, half // 8)


@_jit
def _write(
    bf16, q, q_row, heads, k, k_row, v, v_row, kv_heads, dim, table, positions, slots, k_cache,
    v_cache, first, last,
):
    size = (2 if bf16 else 4) * dim
    for i in range(first, last):
        cos = table + 4 * dim * load_i64(positions + 8 * i)
        slot = load_i64(slots + 8 * i) * kv_heads * size
        for h in range(heads):
            place = q + i * q_row + h * size
            _rotate(bf16, place, cos, place, dim)
        for h in range(kv_heads):
            _rotate(bf16, k + i * k_row + h * size, cos, k_cache + slot + h * size, dim)
        copy_row(v + i * v_row, v_cache + slot, kv_heads * size)


def _write_part(a):
    first, last = _share(word(a, 0), thread_number(), team_size())
    _write(
        word(a, 3), word(a, 4), word(a, 5), word(a, 6), word(a, 7), word(a, 8), word(a, 9),
        word(a, 10), word(a, 11), word(a, 12), word(a, 13), word(a, 14), word(a, 15),
        word(a, 16), word(a, 17), first, last,
    )


WRITE = Worker(_write_part)


@_jit
def write_rows(
    bf16: Any, q, q_row, heads, k, k_row, v, v_row, kv_heads, dim, table, positions, slots,
    k_cache, v_cache, rows, threads, part,
):
    """Rotate q in place (heads = 0: no q) and k, and scatter k and v to their slots."""
    if threads == 1 or rows * (heads + 2 * kv_heads) * dim * 2 < SERIAL_BYTES:
        _write(
            bf16, q, q_row, heads, k, k_row, v, v_row, kv_heads, dim, table, positions, slots,
            k_cache, v_cache, 0, rows,
        )
    else:
        a = np.array((
            rows, threads, 0, np.int64(bf16), q, q_row, heads, k, k_row, v, v_row, kv_heads, dim,
            table, positions, slots, k_cache, v_cache,
        ))
        gomp_parallel(part, a.ctypes.data, threads, 0)
        a[0] = 0  # numba frees an array after its last use: not before the call ends


@_jit
def copy_rows(to_cache: Any, rows, stride, slots, k_cache, v_cache, size, count):
    """Rows of K then V, `size` bytes each, to (or from) their slots."""
    for i in range(count):
        row, slot = rows + i * stride, load_i64(slots + 8 * i) * size
        if to_cache:
            copy_row(row, k_cache + slot, size)
            copy_row(row + size, v_cache + slot, size)
        else:
            copy_row(k_cache + slot, row, size)
            copy_row(v_cache + slot, row + size, size)


@_jit
def _stage(source, layer_bytes, rows, targets, count, staging, step, size, first, last):
    for i in range(first, last):
        layer, j = i // count, i % count
        row = source + layer * layer_bytes + word(rows, j) * size
        copy_row(row, staging + layer * step + word(targets, j) * size, size)


def _stage_part(a):
    first, last = _share(word(a, 0), thread_number(), team_size())
    _stage(
        word(a, 3), word(a, 4), word(a, 5), word(a, 6), word(a, 7), word(a, 8), word(a, 9),
        word(a, 10), first, last,
    )


STAGE = Worker(_stage_part)


@_jit
def stage_rows(
    source, layer_bytes, layers: Any, rows, targets, count, staging, step, size, threads, part
):
    """Copy `count` rows of `size` bytes of each layer; in staging layers are `step` bytes apart."""
    work = layers * count
    if threads == 1 or work * size < SERIAL_BYTES:
        _stage(source, layer_bytes, rows, targets, count, staging, step, size, 0, work)
    else:
        a = np.array(
            (work, threads, 0, source, layer_bytes, rows, targets, count, staging, step, size)
        )
        gomp_parallel(part, a.ctypes.data, threads, 0)
        a[0] = 0  # numba frees an array after its last use: not before the call ends

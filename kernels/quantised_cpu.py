"""Numba kernels of quantised projections; `kernels.quantised` has the formats and the checks."""

# Argument lists of twenty numbers, one to a line, would hide the code.
# fmt: off
from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kernels.parallel import Worker, gomp_parallel, team_size, thread_number
from kernels.quantised_ir import GROUP, quantise_row, quantised_tile
from kernels.vector_ir import LANES, load_i64

_jit = njit(cache=True, error_model="numpy")
SERIAL_INPUTS = 1 << 14  # below this many a second thread costs more than it does
CHUNK_BYTES = 1 << 18  # of quantised inputs, which stay in the L2 cache meanwhile


@_jit
def _word(address, index):
    return load_i64(address + 8 * index)


@_jit
def _quantise(bits, planes, bf16, x, x_row, groups, out, out_row, first, last):
    for i in range(first, last):
        a, o = x + i * x_row, out + i * planes * out_row
        if planes == 2:
            if bf16:
                quantise_row(8, 2, 1, a, groups, o, out_row)
            else:
                quantise_row(8, 2, 0, a, groups, o, out_row)
        elif bits == 4:
            if bf16:
                quantise_row(4, 1, 1, a, groups, o, out_row)
            else:
                quantise_row(4, 1, 0, a, groups, o, out_row)
        elif bf16:
            quantise_row(8, 1, 1, a, groups, o, out_row)
        else:
            quantise_row(8, 1, 0, a, groups, o, out_row)


def _quantise_part(a):
    part, parts, rows = thread_number(), team_size(), _word(a, 8)
    _quantise(
        _word(a, 0), _word(a, 1), _word(a, 2), _word(a, 3), _word(a, 4), _word(a, 5), _word(a, 6),
        _word(a, 7), part * rows // parts, (part + 1) * rows // parts,
    )


QUANTISE = Worker(_quantise_part)


def _make_tiles(bits: int, planes: int, bf16: int) -> Any:
    """All rows of x against one block of outputs, eight rows at a time, then four, two and one."""

    @_jit
    def tiles(codes, scales, x, x_row, groups, bias, out, out_row, rows):
        i = 0
        while i < rows:
            a, o, n = x + i * x_row, out + i // planes * out_row, rows - i
            if n >= 8:
                quantised_tile(
                    bits, planes, bf16, 8, codes, scales, a, x_row, groups, bias, o, out_row
                )
                i += 8
            elif n >= 4:
                quantised_tile(
                    bits, planes, bf16, 4, codes, scales, a, x_row, groups, bias, o, out_row
                )
                i += 4
            elif n >= 2:
                quantised_tile(
                    bits, planes, bf16, 2, codes, scales, a, x_row, groups, bias, o, out_row
                )
                i += 2
            else:
                quantised_tile(
                    bits, planes, bf16, 1, codes, scales, a, x_row, groups, bias, o, out_row
                )
                i += 1

    return tiles


_tiles_4_fp32, _tiles_4_bf16 = _make_tiles(4, 1, 0), _make_tiles(4, 1, 1)
_tiles_8_fp32, _tiles_8_bf16 = _make_tiles(8, 1, 0), _make_tiles(8, 1, 1)
_tiles_wide = _make_tiles(8, 2, 0)


@_jit
def _product(
    bits, planes, bf16, codes, scales, groups, x, x_row, rows, bias, out, out_row, first, last
):
    """Blocks [first, last) of 16 outputs, for chunks of rows of x that stay in the cache."""
    code_bytes = groups * GROUP * LANES * bits // 8
    scale_bytes = groups * LANES * (4 if bits == 4 else 2)
    size = 2 if bf16 else 4
    chunk = max(8, CHUNK_BYTES // x_row // 8 * 8)
    for start in range(0, rows, chunk):
        count = min(chunk, rows - start)
        a, o = x + start * x_row, out + start // planes * out_row
        for block in range(first, last):
            c, s = codes + block * code_bytes, scales + block * scale_bytes
            at, b = o + block * LANES * size, bias + block * LANES * 4
            if planes == 2:
                _tiles_wide(c, s, a, x_row, groups, b, at, out_row, count)
            elif bits == 4:
                if bf16:
                    _tiles_4_bf16(c, s, a, x_row, groups, b, at, out_row, count)
                else:
                    _tiles_4_fp32(c, s, a, x_row, groups, b, at, out_row, count)
            elif bf16:
                _tiles_8_bf16(c, s, a, x_row, groups, b, at, out_row, count)
            else:
                _tiles_8_fp32(c, s, a, x_row, groups, b, at, out_row, count)


def _product_part(a):
    part, parts, blocks = thread_number(), team_size(), _word(a, 12)
    _product(
        _word(a, 0), _word(a, 1), _word(a, 2), _word(a, 3), _word(a, 4), _word(a, 5), _word(a, 6),
        _word(a, 7), _word(a, 8), _word(a, 9), _word(a, 10), _word(a, 11),
        part * blocks // parts, (part + 1) * blocks // parts,
    )


PRODUCT = Worker(_product_part)


@_jit
def linear(
    bits: Any, planes, in_bf16, out_bf16, codes, scales, groups, blocks, x, x_row, rows, bias, out,
    out_row, scratch, threads, quantise_part, product_part,
):
    """Quantise all rows into `scratch`, then multiply."""
    row_bytes = groups * (GROUP + 8)
    if threads == 1 or rows * groups * GROUP < SERIAL_INPUTS:
        _quantise(bits, planes, in_bf16, x, x_row, groups, scratch, row_bytes, 0, rows)
    else:
        a = np.array((
            bits, planes, np.int64(in_bf16), x, x_row, groups, scratch, row_bytes, rows,
        ))
        gomp_parallel(quantise_part, a.ctypes.data, threads, 0)
        a[0] = 0  # numba frees an array after its last use: not before the call ends
    if threads == 1:
        _product(
            bits, planes, out_bf16, codes, scales, groups, scratch, row_bytes, rows * planes, bias,
            out, out_row, 0, blocks,
        )
    else:
        a = np.array((
            bits, planes, np.int64(out_bf16), codes, scales, groups, scratch, row_bytes,
            rows * planes, bias, out, out_row, blocks,
        ))
        gomp_parallel(product_part, a.ctypes.data, threads, 0)
        a[0] = 0  # numba frees an array after its last use: not before the call ends

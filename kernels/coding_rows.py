"""Numba kernels of coded checkpoints: one pass over a row to code it, one to bring it back.

bf16 numbers are their bits, uint16. Built of nothing but this file, so that Numba's own check of
its cache is enough. No product is fused with a sum: coding and decoding must agree to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kernels import compile_cache as compile_cache  # before any function is compiled

_jit = njit(cache=True, error_model="numpy")


@_jit
def _rounded(number: Any) -> Any:
    """fp32 -> bf16 bits, to nearest even."""
    one = np.empty(1, np.float32)
    one[0] = number
    bits = one.view(np.uint32)[0]
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16)


@_jit
def _number(bits: Any) -> Any:
    one = np.empty(1, np.uint32)
    one[0] = np.uint32(bits) << 16
    return one.view(np.float32)[0]


@_jit
def _load_row(source: Any, row: Any, row_bits: Any, is_bf16: Any) -> None:
    if is_bf16:
        for j in range(len(row)):
            row_bits[j] = np.uint32(source[j]) << np.uint32(16)
    else:
        for j in range(len(row)):
            row_bits[j] = source[j]


@_jit
def _store_row(row_bits: Any, target: Any, is_bf16: Any) -> None:
    if is_bf16:
        for j in range(len(row_bits)):
            bits = row_bits[j]
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            target[j] = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    else:
        for j in range(len(row_bits)):
            target[j] = row_bits[j]


@_jit
def _scale_8(row: Any) -> Any:
    """bf16 bits of a 127th of the row's largest magnitude."""
    top = np.float32(0)
    for j in range(len(row)):
        top = max(top, abs(row[j]))
    return _rounded(top / np.float32(127))


@_jit
def _code_8(row: Any, scale: Any, codes: Any) -> None:
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    for j in range(len(row)):
        value = np.rint(row[j] * inverse)
        codes[j] = np.int8(min(max(value, np.float32(-127)), np.float32(127)))


@_jit
def _add_8(codes: Any, scale: Any, total: Any) -> None:
    for j in range(len(total)):
        product = np.float32(codes[j]) * scale
        total[j] = total[j] + product


@_jit
def _scale_6(row: Any) -> Any:
    """bf16 bits of the row's root mean square."""
    squares = np.float32(0)
    for j in range(len(row)):
        squares += row[j] * row[j]
    return _rounded(np.sqrt(squares / np.float32(len(row))))


@_jit
def _code_6(row: Any, scale: Any, bins: Any, reach: Any, codes: Any) -> None:
    """Four codes of six bits in three bytes, each a quarter of the row."""
    quarter = len(row) // 4
    half = np.float32(len(bins) // 2)
    inverse = half / (scale * np.float32(reach)) if scale > 0 else np.float32(0)
    last = np.float32(len(bins) - 1)
    for j in range(quarter):
        d = bins[int(min(max(row[3 * quarter + j] * inverse + half, np.float32(0)), last))]
        for k in range(3):
            at = k * quarter + j
            low = bins[int(min(max(row[at] * inverse + half, np.float32(0)), last))]
            codes[at] = low | (((d >> (2 * k)) & 3) << 6)


@_jit
def _add_6(codes: Any, scale: Any, levels: Any, total: Any) -> None:
    quarter = len(total) // 4
    a, b, c = codes[:quarter], codes[quarter : 2 * quarter], codes[2 * quarter : 3 * quarter]
    for k in range(3):
        for j in range(k * quarter, (k + 1) * quarter):
            product = levels[codes[j] & 63] * scale
            total[j] = total[j] + product
    for j in range(quarter):
        high = (a[j] >> 6) | ((b[j] >> 6) << 2) | ((c[j] >> 6) << 4)
        product = levels[high] * scale
        total[3 * quarter + j] = total[3 * quarter + j] + product


@_jit
def encode_rows(
    is_bf16: Any, bits: Any, hidden: Any, levels: Any, bins: Any, reach: Any, out: Any
) -> None:
    """hidden [layers, n, D] as bits; out uint8 [layers, n * codes and n scales], written."""
    layers, rows, width = hidden.shape
    size = width if bits == 8 else 3 * width // 4
    row = np.empty(width, np.float32)
    total = np.empty(width, np.float32)
    row_bits = row.view(np.uint32)
    for i in range(rows):
        total[:] = 0
        for layer in range(layers):
            _load_row(hidden[layer, i], row, row_bits, is_bf16)
            for j in range(width):
                row[j] = row[j] - total[j]
            codes = out[layer, i * size : (i + 1) * size]
            place = rows * size + 2 * i
            if bits == 8:
                scale_bits = _scale_8(row)
                scale = _number(scale_bits)
                signed = codes.view(np.int8)
                _code_8(row, scale, signed)
                _add_8(signed, scale, total)
            else:
                scale_bits = _scale_6(row)
                scale = _number(scale_bits)
                _code_6(row, scale, bins, reach, codes)
                _add_6(codes, scale, levels, total)
            out[layer, place] = scale_bits & 255
            out[layer, place + 1] = scale_bits >> 8


@_jit
def decode_rows(
    is_bf16: Any, bits: Any, coded: Any, rows: Any, levels: Any, total: Any, out: Any
) -> None:
    """coded uint8 of a chunk of `rows`; total fp32 [n, D], its first n rows' sum; out as bits."""
    count, width = total.shape
    size = width if bits == 8 else 3 * width // 4
    scales = rows * size
    for i in range(count):
        place = scales + 2 * i
        scale = _number(np.uint16(coded[place]) | (np.uint16(coded[place + 1]) << 8))
        codes = coded[i * size : (i + 1) * size]
        if bits == 8:
            _add_8(codes.view(np.int8), scale, total[i])
        else:
            _add_6(codes, scale, levels, total[i])
        _store_row(total[i].view(np.uint32), out[i], is_bf16)


@_jit
def encode_heads(is_bf16: Any, kv: Any, first: Any, rows: Any, out: Any) -> None:
    """kv [layers, 2, slots, heads, d] as bits; out uint8 [layers, codes and scales], written."""
    layers, _, _, heads, dim = kv.shape
    row = np.empty(dim, np.float32)
    row_bits = row.view(np.uint32)
    scales = 2 * rows * heads * dim
    for layer in range(layers):
        at = 0
        for part in range(2):
            for i in range(rows):
                for head in range(heads):
                    _load_row(kv[layer, part, first + i, head], row, row_bits, is_bf16)
                    scale_bits = _scale_8(row)
                    codes = out[layer, at * dim : (at + 1) * dim].view(np.int8)
                    _code_8(row, _number(scale_bits), codes)
                    out[layer, scales + 2 * at] = scale_bits & 255
                    out[layer, scales + 2 * at + 1] = scale_bits >> 8
                    at += 1


@_jit
def decode_heads(is_bf16: Any, coded: Any, rows: Any, kv: Any, first: Any, count: Any) -> None:
    """The inverse, of the first `count` of `rows`: coded uint8 [layers, bytes]; kv written."""
    layers, _, _, heads, dim = kv.shape
    row = np.empty(dim, np.float32)
    row_bits = row.view(np.uint32)
    scales = 2 * rows * heads * dim
    for layer in range(layers):
        for part in range(2):
            for i in range(count):
                for head in range(heads):
                    at = (part * rows + i) * heads + head
                    place = scales + 2 * at
                    bits = np.uint16(coded[layer, place])
                    bits |= np.uint16(coded[layer, place + 1]) << 8
                    scale = _number(bits)
                    codes = coded[layer, at * dim : (at + 1) * dim].view(np.int8)
                    for j in range(dim):
                        row[j] = np.float32(codes[j]) * scale
                    _store_row(row_bits, kv[layer, part, first + i, head], is_bf16)

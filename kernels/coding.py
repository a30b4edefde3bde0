"""Checkpoints in few bits: hidden states of a rotated model, and K/V, with a scale for each row.

A chunk of n rows is its codes, row after row, then a bf16 scale for each row.

Hidden states: each layer is coded as its difference to the layer before *as it will come back*, so
that errors do not add up; the first of them as it is. With 8 bits a number is a multiple of a 127th
of the row's largest; with 6 bits it is one of 64 levels for a normal distribution, times the row's
root mean square (in the rotated basis differences are about normal), four of them in three bytes.
K/V: 8 bits, and a row is one head of one token.

On the CPU Numba kernels, on other devices the twins of `reference`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import reference_coding
from kernels.reference_coding import LEVELS, REACH, level_bins

SCALE_BYTES = 2


def hidden_row_bytes(width: int, bits: int) -> int:
    """Bytes of one token's hidden states in one layer; width is a multiple of 4."""
    return width * bits // 8 + SCALE_BYTES


def kv_row_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one token's K and V in one layer, 8 bits each."""
    return 2 * num_kv_heads * (head_dim + SCALE_BYTES)


def encode_hidden(hidden: Tensor, bits: int) -> Tensor:
    """Code some layers' hidden states: [layers, n, D] bf16 or fp32, of any stride.

    bits: 8 or 6; D is a multiple of 4. Returns uint8 [layers, n * hidden_row_bytes].
    """
    layers, rows, width = hidden.shape
    if hidden.device.type != "cpu":
        return reference_coding.encode_hidden(hidden, bits)
    from kernels import coding_rows

    out = torch.empty((layers, rows * hidden_row_bytes(width, bits)), dtype=torch.uint8)
    coding_rows.encode_rows(
        hidden.dtype == torch.bfloat16,
        bits,
        _bits(hidden.contiguous()),  # so that there is one kernel to compile
        LEVELS.numpy(),
        level_bins().numpy(),
        REACH,
        out.numpy(),
    )
    return out


def decode_hidden(coded: Tensor, rows: int, bits: int, total: Tensor, out: Tensor) -> None:
    """Bring back a layer's first n hidden states.

    coded uint8, a chunk of `rows` rows; total fp32 [n, D], contiguous: the layer before as it came
    back (zeros for the first), written; out [n, D] bf16 or fp32, written.
    """
    if total.device.type != "cpu":
        reference_coding.decode_hidden(coded, rows, bits, total, out)
        return
    from kernels import coding_rows

    coding_rows.decode_rows(
        out.dtype == torch.bfloat16,
        bits,
        coded.numpy(),
        rows,
        LEVELS.numpy(),
        total.numpy(),
        _bits(out),
    )


def encode_kv(kv: Tensor, first: int, rows: int) -> Tensor:
    """Code some layers' K/V at slots [first, first + rows).

    kv [layers, 2, slots, num_kv_heads, head_dim]; returns uint8 [layers, rows * kv_row_bytes].
    """
    layers, _, _, heads, dim = kv.shape
    if kv.device.type != "cpu":
        return reference_coding.encode_kv(kv, first, rows)
    from kernels import coding_rows

    out = torch.empty((layers, rows * kv_row_bytes(heads, dim)), dtype=torch.uint8)
    is_bf16 = kv.dtype == torch.bfloat16
    coding_rows.encode_heads(is_bf16, _bits(kv), first, rows, out.numpy())
    return out


def decode_kv(coded: Tensor, rows: int, kv: Tensor, slots: slice) -> None:
    """Bring back some layers' K/V of the first tokens of their chunks.

    coded uint8 [layers, rows * kv_row_bytes]; kv [layers, 2, all slots, num_kv_heads, head_dim],
    written at the adjacent `slots`.
    """
    if kv.device.type != "cpu":
        reference_coding.decode_kv(coded, rows, kv, slots)
        return
    from kernels import coding_rows

    count = slots.stop - slots.start
    is_bf16 = kv.dtype == torch.bfloat16
    coding_rows.decode_heads(is_bf16, coded.numpy(), rows, _bits(kv), slots.start, count)


def warm_up(dtype: torch.dtype, bits: int) -> None:
    """Compile the CPU's kernels, or load them from the cache on disk."""
    hidden, kv = torch.zeros(1, 1, 16, dtype=dtype), torch.zeros(1, 2, 1, 1, 16, dtype=dtype)
    decode_hidden(encode_hidden(hidden, bits)[0], 1, bits, torch.zeros(1, 16), hidden[0])
    decode_kv(encode_kv(kv, 0, 1), 1, kv, slice(0, 1))


def _bits(tensor: Tensor) -> npt.NDArray[np.unsignedinteger]:
    kind = torch.uint16 if tensor.dtype == torch.bfloat16 else torch.uint32
    bits: npt.NDArray[np.unsignedinteger] = tensor.view(kind).numpy()
    return bits

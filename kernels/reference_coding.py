"""Obvious twins of the coding kernels, on any device; for tests, for CUDA, and for reading."""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

# 64 levels for a normal distribution of variance 1, ascending: the density of the best levels is
# that of a normal distribution thrice as wide (Panter and Dite, 1951)
LEVELS = torch.tensor([3**0.5 * NormalDist().inv_cdf((i + 0.5) / 64) for i in range(64)])
REACH = 4.5  # the table of bins goes so far to both sides
_BINS = 4096


@lru_cache(maxsize=1)
def level_bins() -> Tensor:
    """The level closest to the middle of each of 4,096 bins over [-REACH, REACH): uint8."""
    middles = (torch.arange(_BINS) + 0.5) * (2 * REACH / _BINS) - REACH
    return torch.bucketize(middles, (LEVELS[1:] + LEVELS[:-1]) / 2).to(torch.uint8)


def _scale_bytes(scale: Tensor) -> Tensor:
    """bf16 [n, 1] -> uint8 [2 n]."""
    return scale.to(torch.bfloat16).flatten().view(torch.uint8)


def _scales(raw: Tensor) -> Tensor:
    """The other way: fp32 [n, 1]."""
    return raw.clone().view(torch.bfloat16).float()[:, None]


def _encode_8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x fp32 [n, D] -> codes uint8 [n, D], scales bf16 [n, 1]."""
    scale = (x.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16)
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = (x * inverse).round().clamp(-127, 127).to(torch.int8)
    return codes.view(torch.uint8), scale


def _decode_8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.view(torch.int8).float() * scale


def _encode_6(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.pow(2).mean(dim=1, keepdim=True).sqrt().to(torch.bfloat16)
    inverse = torch.where(scale > 0, _BINS / 2 / (scale.float() * REACH), 0.0)
    bins = (x * inverse + _BINS / 2).clamp(0, _BINS - 1).long()
    low, d = level_bins().to(x.device)[bins].split([3 * x.shape[1] // 4, x.shape[1] // 4], dim=1)
    high = torch.cat([(d >> shift & 3) << 6 for shift in (0, 2, 4)], dim=1)
    return low | high, scale


def _decode_6(codes: Tensor, scale: Tensor) -> Tensor:
    a, b, c = (codes >> 6).chunk(3, dim=1)
    every = torch.cat([codes & 63, a | b << 2 | c << 4], dim=1)
    return LEVELS.to(codes.device)[every.long()] * scale


def encode_hidden(hidden: Tensor, bits: int) -> Tensor:
    """As `kernels.coding.encode_hidden`."""
    encode, decode = (_encode_8, _decode_8) if bits == 8 else (_encode_6, _decode_6)
    total = torch.zeros(hidden.shape[1:], device=hidden.device)
    chunks = []
    for layer in hidden.float():
        codes, scale = encode(layer - total)
        total = total + decode(codes, scale.float())
        chunks.append(torch.cat([codes.flatten(), _scale_bytes(scale)]))
    return torch.stack(chunks)


def decode_hidden(coded: Tensor, rows: int, bits: int, total: Tensor, out: Tensor) -> None:
    """As `kernels.coding.decode_hidden`."""
    count, width = total.shape
    size = rows * width * bits // 8
    codes = coded[:size].view(rows, -1)[:count]
    decode = _decode_8 if bits == 8 else _decode_6
    total += decode(codes, _scales(coded[size:])[:count])
    out.copy_(total)


def encode_kv(kv: Tensor, first: int, rows: int) -> Tensor:
    """As `kernels.coding.encode_kv`."""
    chunks = []
    for layer in kv[:, :, first : first + rows].float():
        codes, scale = _encode_8(layer.reshape(-1, kv.shape[-1]))
        chunks.append(torch.cat([codes.flatten(), _scale_bytes(scale)]))
    return torch.stack(chunks)


def decode_kv(coded: Tensor, rows: int, kv: Tensor, slots: slice) -> None:
    """As `kernels.coding.decode_kv`."""
    heads, dim = kv.shape[-2:]
    size = 2 * rows * heads * dim
    for layer, raw in zip(kv, coded, strict=True):
        back = _decode_8(raw[:size].view(-1, dim), _scales(raw[size:]))
        layer[:, slots] = back.view(2, rows, heads, dim)[:, : slots.stop - slots.start].to(kv.dtype)

"""The K/V tensors of all layers."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from engine.memory.page_pool import PAGE_SIZE


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU in memory that is not taken from the machine until it is written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=dtype).view(shape)


class KVCache:
    """Owns the K/V memory. Written by the kernels that the model and the restorer call only.

    kv [num_layers, 2, num_slots, num_kv_heads, head_dim]; slot = page_id * 64 + offset. Index 0 of
    the second axis is K after RoPE, index 1 is V.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, 2, num_pages * PAGE_SIZE, num_kv_heads, head_dim)
        self.kv = _zeros(shape, dtype, torch.device(device))
        self.k: list[Tensor] = [self.kv[layer, 0] for layer in range(num_layers)]
        self.v: list[Tensor] = [self.kv[layer, 1] for layer in range(num_layers)]

    @staticmethod
    def bytes_per_page(
        num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return num_layers * 2 * PAGE_SIZE * num_kv_heads * head_dim * dtype.itemsize

    def copy_tokens(self, source_page: int, target_page: int, num_tokens: int) -> None:
        """Copy the K/V of a page's first tokens, all layers, to another page's first tokens."""
        source, target = source_page * PAGE_SIZE, target_page * PAGE_SIZE
        self.kv[:, :, target : target + num_tokens] = self.kv[:, :, source : source + num_tokens]

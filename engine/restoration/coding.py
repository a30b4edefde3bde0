"""How the numbers of a checkpoint lie on disk. Torch-free.

With 16 bits (the default) they are the model's own, bf16 or fp32, and a restore is exact. With 8
bits each number is a code of one byte, with a scale for each token (for each token and head of
K/V); with 6 bits hidden states take six, K/V stay at eight. `kernels.coding` says how they are
made. Hidden states are coded in a rotated basis only: see `engine.model.rotation`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from engine.config import CheckpointBits, CheckpointMethod

SCALE_BYTES = 2
ITEM_BYTES = {"fp32": 4, "bf16": 2}
CODED_BITS = {"q8": 8, "q6": 6}  # by the name of a chunk's coding


@dataclass(frozen=True)
class Coding:
    """The element coding of all that a server saves; `dtype` is the model's, bf16 or fp32."""

    bits: CheckpointBits
    dtype: str

    @property
    def hidden(self) -> str:
        """Name of a hidden chunk's coding."""
        return self.dtype if self.bits == 16 else f"q{self.bits}"

    @property
    def kv(self) -> str:
        """Name of a K/V chunk's coding."""
        return self.dtype if self.bits == 16 else "q8"

    def hidden_bytes(self, hidden_size: int) -> int:
        """Bytes of one token's hidden states in one layer."""
        if self.bits == 16:
            return hidden_size * ITEM_BYTES[self.dtype]
        return hidden_size * self.bits // 8 + SCALE_BYTES

    def kv_bytes(self, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of one token's K and V in one layer."""
        if self.bits == 16:
            return 2 * num_kv_heads * head_dim * ITEM_BYTES[self.dtype]
        return 2 * num_kv_heads * (head_dim + SCALE_BYTES)

    def needs_rotation(
        self, method: CheckpointMethod, hidden_size: int, num_kv_heads: int, head_dim: int
    ) -> bool:
        """Whether hidden states may be coded, which only a rotated model's can be."""
        if self.bits == 16:
            return False
        smaller = self.hidden_bytes(hidden_size) < self.kv_bytes(num_kv_heads, head_dim)
        return method == "hidden" or (method == "auto" and smaller)

    def fingerprint(self, of_weights: bytes) -> bytes:
        """What stripes of this coding are kept under; that of the weights where nothing is coded.

        So that a server that was set back to 16 bits restores nothing but what is exact.
        """
        if self.bits == 16:
            return of_weights
        key = f"{self.hidden} {self.kv}".encode()
        return hashlib.blake2b(of_weights + key, digest_size=16).digest()

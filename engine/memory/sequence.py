"""A run of tokens with its pages: what a chat, or a shared prefix, holds of K/V memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from engine.memory.page_pool import PAGE_SIZE, PagePool, pages_for

DIGEST_BYTES = 16


def common_length(a: Seq[int], b: Seq[int]) -> int:
    """Length of the longest common prefix of two lists of token ids."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])


class Sequence:
    """Owns the token ids of one owner and the pages that hold their K/V. Engine thread only.

    `ids` are relative to the owner: token i has the position `position + i`, where `position` is
    the length of the shared prefix before it. Tokens [0, num_computed) have K/V in the pages,
    which are append-only while a request runs on them. Page k holds tokens [64 k, 64 k + 64).
    """

    def __init__(self, owner: str, ids: list[int], position: int, ancestors: bytes) -> None:
        self.owner = owner
        self.ids = ids
        self.position = position
        self.page_ids: list[int] = []
        self.num_computed = 0
        self.num_saved = 0  # leading tokens whose chunks were handed to the store
        self._ancestors = ancestors  # their ids, int32 little endian
        self._digests: list[bytes] = []  # of all ids before stripe k, ancestors included
        self._state = hashlib.blake2b(ancestors, digest_size=DIGEST_BYTES)  # behind the last one

    def __len__(self) -> int:
        return len(self.ids)

    def array(self, start: int, end: int) -> npt.NDArray[np.int32]:
        return np.array(self.ids[start:end], dtype=np.int32)

    def stripe_digest(self, stripe: int) -> bytes:
        """Digest of all token ids before stripe `stripe`, those of the ancestors included.

        16 bytes of BLAKE2b over int32 little endian ids. The ids before the stripe are final.
        """
        while (known := len(self._digests)) <= stripe:
            if known:
                ids = self.array((known - 1) * PAGE_SIZE, known * PAGE_SIZE)
                self._state.update(ids.astype("<i4").tobytes())
            self._digests.append(self._state.digest())
        return self._digests[stripe]

    def reserve(self, num_tokens: int, pool: PagePool) -> bool:
        """Hold pages for the first `num_tokens` tokens; False, and no change, when too few."""
        need = pages_for(num_tokens) - len(self.page_ids)
        if need <= 0:
            return True
        pages = pool.allocate(need)
        if pages is None:
            return False
        self.page_ids.extend(pages)
        return True

    def truncate(self, num_tokens: int, pool: PagePool) -> None:
        """Forget all tokens from `num_tokens` on, and give their pages back."""
        keep = pages_for(num_tokens)
        pool.release(self.page_ids[keep:])
        del self.page_ids[keep:]
        del self.ids[num_tokens:]
        self.num_computed = min(self.num_computed, num_tokens)
        self.num_saved = min(self.num_saved, num_tokens)
        if len(self._digests) > num_tokens // PAGE_SIZE + 1:
            self._digests = []
            self._state = hashlib.blake2b(self._ancestors, digest_size=DIGEST_BYTES)

    def release(self, pool: PagePool) -> None:
        """Give all pages back; the ids stay."""
        pool.release(self.page_ids)
        self.page_ids = []
        self.num_computed = 0
        self.num_saved = 0

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


class IdDigest:
    """A running digest of token ids: 16 bytes of BLAKE2b over int32 little endian. Immutable."""

    def __init__(self, ids: Seq[int] = ()) -> None:
        self._state = hashlib.blake2b(_bytes(ids), digest_size=DIGEST_BYTES)

    def then(self, ids: Seq[int]) -> IdDigest:
        """The digest of the ids so far and these behind them."""
        longer = IdDigest.__new__(IdDigest)
        longer._state = self._state.copy()
        longer._state.update(_bytes(ids))
        return longer

    @property
    def value(self) -> bytes:
        return self._state.digest()


def _bytes(ids: Seq[int]) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


class Sequence:
    """Owns a run of token ids of one owner, and the pages that hold their K/V. Engine thread only.

    Token i is the owner's token `offset + i` (a whole number of pages lies before it) and has the
    position `position + i`. Tokens [0, num_computed) have K/V in the pages, which are append-only
    while a request runs on them. Page k holds tokens [64 k, 64 k + 64); it is the owner's stripe
    `offset / 64 + k`.
    """

    def __init__(
        self, owner: str, ids: list[int], position: int, before: IdDigest, offset: int = 0
    ) -> None:
        """`before` is the digest of all token ids before the first, the ancestors' included."""
        if offset % PAGE_SIZE:
            raise ValueError(f"a sequence cannot begin at token {offset}: not a page's start")
        self.owner = owner
        self.ids = ids
        self.position = position
        self.offset = offset
        self.page_ids: list[int] = []
        self.num_computed = 0
        self.num_saved = 0  # leading tokens whose chunks were handed to the store
        self.saves = True  # whether chunks are handed to the store at all
        self._digests = [before]  # of all ids before each page, as far as they were asked for

    def __len__(self) -> int:
        return len(self.ids)

    def array(self, start: int, end: int) -> npt.NDArray[np.int32]:
        return np.array(self.ids[start:end], dtype=np.int32)

    def digest_before(self, page: int) -> IdDigest:
        """Digest of all token ids before page `page`; those ids are final."""
        known = self._digests
        while len(known) <= page:
            start = (len(known) - 1) * PAGE_SIZE
            known.append(known[-1].then(self.ids[start : start + PAGE_SIZE]))
        return known[page]

    def digest_after(self) -> IdDigest:
        """Digest of all token ids to this sequence's end."""
        pages = len(self.ids) // PAGE_SIZE
        return self.digest_before(pages).then(self.ids[pages * PAGE_SIZE :])

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

    def split(self, num_tokens: int) -> Sequence:
        """Hand the first `num_tokens` tokens, whole pages with K/V, over to a new sequence."""
        if num_tokens % PAGE_SIZE or not 0 < num_tokens <= len(self.ids):
            raise ValueError(f"{num_tokens} of {len(self.ids)} tokens are not whole pages")
        pages = num_tokens // PAGE_SIZE
        digest = self.digest_before(pages)
        upper = Sequence(
            self.owner, self.ids[:num_tokens], self.position, self._digests[0], self.offset
        )
        upper._digests = self._digests[:pages]
        upper.page_ids = self.page_ids[:pages]
        upper.num_computed = min(self.num_computed, num_tokens)
        upper.num_saved = min(self.num_saved, num_tokens)
        upper.saves = self.saves
        self._digests = [digest]
        self.ids = self.ids[num_tokens:]
        self.page_ids = self.page_ids[pages:]
        self.position += num_tokens
        self.offset += num_tokens
        self.num_computed -= upper.num_computed
        self.num_saved -= upper.num_saved
        return upper

    def join(self, upper: Sequence) -> None:
        """Take over all tokens and pages of the sequence just before this one: undoes `split`."""
        if upper.offset + len(upper) != self.offset or upper.num_computed < len(upper):
            raise ValueError("only a whole sequence that ends where this one begins can be joined")
        if upper.num_saved < len(upper):
            self.num_saved = upper.num_saved
        else:
            self.num_saved += len(upper)
        self.ids = upper.ids + self.ids
        self.page_ids = upper.page_ids + self.page_ids
        self.position, self.offset = upper.position, upper.offset
        self.num_computed += len(upper)
        self._digests = [upper._digests[0]]
        upper.page_ids = []

    def truncate(self, num_tokens: int, pool: PagePool) -> None:
        """Forget all tokens from `num_tokens` on, and give their pages back."""
        keep = pages_for(num_tokens)
        pool.release(self.page_ids[keep:])
        del self.page_ids[keep:]
        del self.ids[num_tokens:]
        self.num_computed = min(self.num_computed, num_tokens)
        self.num_saved = min(self.num_saved, num_tokens)
        del self._digests[num_tokens // PAGE_SIZE + 1 :]

    def release(self, pool: PagePool) -> None:
        """Give all pages back; the ids stay."""
        pool.release(self.page_ids)
        self.page_ids = []
        self.num_computed = 0
        self.num_saved = 0

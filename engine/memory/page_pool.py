"""Pages of K/V memory: who holds which, counted."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

PAGE_SIZE = 64  # tokens; also the length of a chunk on disk


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_SIZE)


class PagePool:
    """Owns the free pages and the reference counts. Engine thread only.

    A page has one reference for each holder: a sequence, or a prefix node. It is free when the
    last holder releases it. The lowest free page is handed out first, so that sequences tend to
    lie in contiguous runs, which the prefix kernel reads without a copy.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; at least 1 is needed")
        self.num_pages = num_pages
        self._ref = [0] * num_pages
        self._free = list(range(num_pages))  # a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, ascending; None when there are too few."""
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._ref[page] = 1
        return pages

    def pin(self, pages: Iterable[int]) -> None:
        """One more reference on each page, all of which are held already."""
        for page in pages:
            if self._ref[page] == 0:
                raise ValueError(f"page {page} is free and cannot be pinned")
            self._ref[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less on each page; a page without references is free."""
        for page in pages:
            if self._ref[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._ref[page] -= 1
            if self._ref[page] == 0:
                heapq.heappush(self._free, page)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that reference counts are exactly what these holders account for."""
        count = [0] * self.num_pages
        for pages in held:
            for page in pages:
                count[page] += 1
        assert count == self._ref, "reference counts differ from what the holders hold"
        assert sorted(self._free) == [p for p, n in enumerate(count) if n == 0], (
            "the free list differs from the pages without references"
        )

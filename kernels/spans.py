"""Which rows of a step read which keys: the metadata that every attention kernel takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE = 64  # tokens
UNMASKED = 1 << 40  # a span's causal base when its rows see all of its keys

Segment = tuple[Sequence[int], int]  # pages, and how many tokens lie in them


@dataclass(frozen=True, slots=True)
class Spans:
    """A span is a range of rows and the keys that they read. Built once per step, for all layers.

    A span's keys are its segments, one after another; each segment starts on a fresh page, so a
    node that ends inside a page may be followed by another. Row r sees key j of its span where
    j <= base + r. The result of a span goes to attention state `state` of its rows; the spans of
    one call cover exactly the rows of the states that the call writes, those without keys with
    empty spans (out = 0, lse = -inf). Spans of a state are in ascending order of rows and do not
    overlap.
    """

    rows: NDArray[np.int64]  # [S, 4]: row start, row stop, causal base, state
    segments: NDArray[np.int64]  # [S, D, 2]: first entry in pages, tokens; 0 tokens: none
    pages: NDArray[np.int32]  # [N]

    @property
    def num_keys(self) -> NDArray[np.int64]:
        """Keys of each span, [S]."""
        total: NDArray[np.int64] = self.segments[:, :, 1].sum(axis=1)
        return total

    @classmethod
    def build(
        cls, spans: Iterable[tuple[int, int, Sequence[Segment], bool]], state: int = 0
    ) -> Spans:
        """From (row start, row stop, segments, causal) per span, all of one state.

        The last row of a causal span sees all of its keys, and each row before it one fewer.
        ValueError: unordered or empty row ranges, a length that the pages do not hold, a causal
        span with fewer keys than rows.
        """
        rows: list[tuple[int, int, int, int]] = []
        table: list[list[tuple[int, int]]] = []
        pages: list[int] = []
        at = 0
        for start, stop, segments, causal in spans:
            if not at <= start < stop:
                raise ValueError(f"rows [{start}, {stop}) do not follow row {at}")
            at = stop
            entries: list[tuple[int, int]] = []
            keys = 0
            for ids, tokens in segments:
                if tokens < 0 or tokens > len(ids) * PAGE_SIZE:
                    raise ValueError(
                        f"{tokens} tokens do not fit in {len(ids)} pages of {PAGE_SIZE}"
                    )
                if tokens:
                    entries.append((len(pages), tokens))
                    pages.extend(ids[: -(-tokens // PAGE_SIZE)])
                    keys += tokens
            if causal and keys < stop - start:
                raise ValueError(f"{keys} keys are fewer than the {stop - start} query rows")
            rows.append((start, stop, keys - stop if causal else UNMASKED, state))
            table.append(entries)
        depth = max(1, max((len(entries) for entries in table), default=1))
        padded = [entries + [(0, 0)] * (depth - len(entries)) for entries in table]
        return cls(
            np.array(rows, dtype=np.int64).reshape(-1, 4),
            np.array(padded, dtype=np.int64).reshape(-1, depth, 2),
            np.array(pages, dtype=np.int32),
        )

    @classmethod
    def groups(
        cls,
        levels: Sequence[Sequence[tuple[int, int, Sequence[int], int]]],
        num_rows: int,
        first_state: int = 1,
    ) -> Spans:
        """Shared nodes, a state per level of the tree: (row start, row stop, pages, tokens) each.

        Level i is state first_state + i; rows in no node of a level get an empty span there, so
        that all num_rows rows of its state are written. Nothing is causal. ValueError: as `build`,
        and rows beyond num_rows.
        """
        parts: list[Spans] = []
        for state, level in enumerate(levels, first_state):
            spans: list[tuple[int, int, list[Segment], bool]] = []
            at = 0
            for start, stop, pages, tokens in level:
                if start > at:
                    spans.append((at, start, [], False))
                spans.append((start, stop, [(pages, tokens)], False))
                at = stop
            if at > num_rows:
                raise ValueError(f"rows up to {at} are beyond the {num_rows} of the step")
            if at < num_rows:
                spans.append((at, num_rows, [], False))
            parts.append(cls.build(spans, state))
        return cls.join(parts)

    @classmethod
    def join(cls, parts: Sequence[Spans]) -> Spans:
        """The spans of all parts in one, in their order."""
        if not parts:
            return cls.build([])
        depth = max(part.segments.shape[1] for part in parts)
        offset = 0
        moved: list[NDArray[np.int64]] = []
        for part in parts:
            segments = np.zeros((len(part.rows), depth, 2), np.int64)
            segments[:, : part.segments.shape[1]] = part.segments
            segments[:, :, 0] += offset
            offset += len(part.pages)
            moved.append(segments)
        return cls(
            np.concatenate([part.rows for part in parts]),
            np.concatenate(moved),
            np.concatenate([part.pages for part in parts]),
        )

"""When a restore read and when it computed, in few spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_SPANS = 64
NEAR_S = 1e-4  # spans of one kind that are no farther apart are one

SpanKind = Literal["read", "compute", "recompute"]
SpanRecord = tuple[str, float, float, int, int]  # kind, start_ms, end_ms, tokens, layers


@dataclass
class _Span:
    kind: SpanKind
    start: float  # seconds of the monotonic clock
    end: float
    parts: dict[int, tuple[int, int]]  # of what was brought in: its tokens, and layers of them

    def take(self, later: _Span) -> None:
        """Become both; `later` begins after this one. Layers of one part add up."""
        self.end = max(self.end, later.end)
        for part, (tokens, layers) in later.parts.items():
            _, before = self.parts.get(part, (0, 0))
            self.parts[part] = (tokens, before + layers)

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.parts.values())

    @property
    def layers(self) -> int:
        return max(layers for _, layers in self.parts.values())


class Timeline:
    """Owns the spans of one restore, at most 64: the closest of a kind are merged. One thread."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []

    def add(
        self, kind: SpanKind, start: float, end: float, part: int, tokens: int, layers: int
    ) -> None:
        """Something took from `start` to `end` (seconds of the monotonic clock).

        part: which tokens these are; the same number for the same ones. Spans of a kind begin in
        ascending order.
        """
        span = _Span(kind, start, end, {part: (tokens, layers)})
        last = next((one for one in reversed(self._spans) if one.kind == kind), None)
        if last is not None and start <= last.end + NEAR_S:
            last.take(span)
            return
        self._spans.append(span)
        if len(self._spans) > MAX_SPANS:
            self._merge_closest()

    def spans(self, origin: float) -> list[SpanRecord]:
        """(kind, start_ms, end_ms, tokens, layers) of each, from `origin`, ascending by start."""
        return [
            (s.kind, 1e3 * (s.start - origin), 1e3 * (s.end - origin), s.tokens, s.layers)
            for s in sorted(self._spans, key=lambda s: s.start)
        ]

    def _merge_closest(self) -> None:
        pairs: list[tuple[float, _Span, _Span]] = []
        last: dict[SpanKind, _Span] = {}
        for span in self._spans:
            if span.kind in last:
                before = last[span.kind]
                pairs.append((span.start - before.end, before, span))
            last[span.kind] = span
        _, first, second = min(pairs, key=lambda pair: pair[0])
        first.take(second)
        self._spans.remove(second)

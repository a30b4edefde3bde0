"""Histograms of durations with log-spaced buckets: small, additive, of a known error.

Bucket b > 0 holds values above `upper_bound(b - 1)` up to `upper_bound(b)`; bucket 0 holds what is
not above `LOWEST`. Eight buckets double the value, so a percentile read from one is within
`MAX_ERROR` of the value that has that rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LOWEST = 0.01  # milliseconds, or per cent
BUCKETS_PER_DOUBLING = 8
LAST_BUCKET = 320  # above 1e10: whatever is larger is counted there
MAX_ERROR = 2 ** (1 / (2 * BUCKETS_PER_DOUBLING)) - 1  # 4.4 %


def bucket_of(value: float) -> int:
    """The bucket that counts a value."""
    if value <= LOWEST:
        return 0
    place = math.ceil(BUCKETS_PER_DOUBLING * math.log2(value / LOWEST))
    return min(LAST_BUCKET, max(0, place))


def upper_bound(bucket: int) -> float:
    """The largest value that a bucket holds."""
    return float(LOWEST * 2 ** (bucket / BUCKETS_PER_DOUBLING))


def percentile(counts: Mapping[int, int], percent: float) -> float | None:
    """The value of nearest rank, within `MAX_ERROR`; None when nothing was counted."""
    total = sum(counts.values())
    if not total:
        return None
    rank = max(1, math.ceil(total * percent / 100))
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return _middle(bucket)
    raise AssertionError("the counts changed meanwhile")


def _middle(bucket: int) -> float:
    """The value whose largest relative distance to those of the bucket is the smallest."""
    if bucket == 0:
        return LOWEST
    return float(LOWEST * 2 ** ((bucket - 0.5) / BUCKETS_PER_DOUBLING))

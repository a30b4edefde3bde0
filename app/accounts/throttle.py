"""How often somebody may try: a number of tries, which come back one by one."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from app.faults import TooManyTries


@dataclass
class _Bucket:
    left: float
    at: float


class Throttle:
    """Owns the tries of the keys seen last, at most `max_keys`. Event loop only."""

    def __init__(
        self,
        tries: int,
        window_s: float,
        *,
        max_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tries = tries
        self._rate = tries / window_s
        self._max_keys = max_keys
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str) -> None:
        """Count a try. Raises TooManyTries, with when the next one comes back."""
        now = self._clock()
        bucket = self._buckets.pop(key, None) or _Bucket(self._tries, now)
        bucket.left = min(self._tries, bucket.left + (now - bucket.at) * self._rate)
        bucket.at = now
        self._buckets[key] = bucket
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        if bucket.left < 1:
            raise TooManyTries(math.ceil((1 - bucket.left) / self._rate))
        bucket.left -= 1

    def forgive(self, key: str) -> None:
        """Give a key all its tries back."""
        self._buckets.pop(key, None)


def network_of(address: str) -> str:
    """What one customer of a provider has: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or found.exploded[:19])

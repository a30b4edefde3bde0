"""The times that rows get."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

logger = logging.getLogger(__name__)

TOLD_FROM = timedelta(seconds=5)  # smaller steps are those of any clock that is kept right


class Clock:
    """Strictly increasing UTC times, so that order by time is the order of the calls."""

    def __init__(self) -> None:
        self._last = datetime.min.replace(tzinfo=UTC)
        self._told = False

    def now(self) -> datetime:
        found = datetime.now(UTC)
        behind = found < self._last and self._last - found > TOLD_FROM
        if behind and not self._told:
            logger.warning(
                "the system's clock went back by %.0f s: times go on from where they were",
                (self._last - found).total_seconds(),
            )
        self._told = behind
        self._last = max(found, self._last + timedelta(microseconds=1))
        return self._last

    def not_before(self, earlier: datetime) -> None:
        """Go on after a time that was given before, should the system's clock have gone back."""
        self._last = max(self._last, earlier)

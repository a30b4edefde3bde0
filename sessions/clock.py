"""The times that rows get."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class Clock:
    """Strictly increasing UTC times, so that order by time is the order of the calls."""

    def __init__(self) -> None:
        self._last = datetime.min.replace(tzinfo=UTC)

    def now(self) -> datetime:
        self._last = max(datetime.now(UTC), self._last + timedelta(microseconds=1))
        return self._last

    def not_before(self, earlier: datetime) -> None:
        """Go on after a time that was given before, should the system's clock have gone back."""
        self._last = max(self._last, earlier)

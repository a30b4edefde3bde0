"""Stop strings that may cross tokens and are never shown in part."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Holds back what may become a stop string; owned by one request.

    An answer is cut where the stop string begins that is the first to be complete (the longest,
    if several are complete at the same character), so how the text was cut into pushes does not
    matter. Empty stop strings are ignored.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = sorted({string for string in stop if string}, key=len, reverse=True)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string was found; nothing is shown any more."""
        return self._stopped

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain to be shown, whether a stop string was found)."""
        if self._stopped:
            return "", True
        if not self._stop:
            return text, False
        text = self._held + text
        cut = self._first_match(text)
        if cut is not None:
            self._held = ""
            self._stopped = True
            return text[:cut], True
        safe = len(text) - self._held_length(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """What was held back, when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the first complete stop string begins."""
        best: tuple[int, int] | None = None  # end, start
        for string in self._stop:
            start = text.find(string)
            if start >= 0 and (best is None or (start + len(string), start) < best):
                best = (start + len(string), start)
        return None if best is None else best[1]

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(self._stop[0]) - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._stop):
                return length
        return 0

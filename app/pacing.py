"""How often running answers are shown: at most five times a second, less when that is dear."""

from __future__ import annotations

import os

FRAME_GAP_S = 0.2
MAX_GAP_S = 2.0
SHARE = 0.01  # of all cores, for what watchers see of running answers
_SMOOTHING = 0.3  # weight of the newest frame


class Pace:
    """Owns what a frame of each watched answer costs, and when the next are due. Event loop only.

    The engine needs the cores: long code or a long list as the last block, seen in many chats at
    once, is shown less often, so that all of it together keeps to its share.
    """

    def __init__(self, cores: int | None = None) -> None:
        """cores: all that this process may use, unless given."""
        self._share = SHARE * (cores or len(os.sched_getaffinity(0)))
        self._next = 0.0  # when the next frames are due
        self._cost_s: dict[str, float] = {}

    def note(self, turn_id: str, seconds: float) -> None:
        """A frame of this answer took so many seconds of processor time."""
        before = self._cost_s.get(turn_id, seconds)
        self._cost_s[turn_id] = before + _SMOOTHING * (seconds - before)

    def forget(self, turn_id: str) -> None:
        """Nobody watches this answer any more."""
        self._cost_s.pop(turn_id, None)

    def wait_s(self, now: float) -> float:
        """Seconds until the next frame, at one moment for all answers: one wake-up serves them.

        now: of the event loop's clock.
        """
        if self._next <= now:
            self._next = now + self.gap_s
        return self._next - now

    @property
    def gap_s(self) -> float:
        """Seconds between two frames of an answer."""
        return min(MAX_GAP_S, max(FRAME_GAP_S, sum(self._cost_s.values()) / self._share))

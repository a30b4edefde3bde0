"""How often running answers are shown: at most five times a second, less when that is dear."""

from __future__ import annotations

FRAME_GAP_S = 0.2
MAX_GAP_S = 2.0
SHARE = 0.03  # of one core, for all that watchers see of running answers
_SMOOTHING = 0.3  # weight of the newest frame


class Pace:
    """Owns what a frame of each watched answer costs. Event loop only.

    The engine needs the cores: long code or a long list as the last block, seen in many chats at
    once, is shown less often, so that all of it together keeps to its share.
    """

    def __init__(self) -> None:
        self._cost_s: dict[str, float] = {}

    def note(self, turn_id: str, seconds: float) -> None:
        """A frame of this answer took so many seconds of processor time."""
        before = self._cost_s.get(turn_id, seconds)
        self._cost_s[turn_id] = before + _SMOOTHING * (seconds - before)

    def forget(self, turn_id: str) -> None:
        """Nobody watches this answer any more."""
        self._cost_s.pop(turn_id, None)

    @property
    def gap_s(self) -> float:
        """Seconds between two frames of an answer."""
        return min(MAX_GAP_S, max(FRAME_GAP_S, sum(self._cost_s.values()) / SHARE))

"""How many tokens of prompts a step reads, so that chats that are answered meanwhile go on."""

from __future__ import annotations

from collections import deque

# A step that also reads prompts may take this much longer than one that only decodes.
ADDED_S = 0.1
LEAST_TOKENS = 32  # fewer read the weights nearly for themselves alone
_KEPT = 8  # measurements; the least of them counts, since others' work on the machine only adds
_ENOUGH = 4


class ChunkSize:
    """Owns what the latest steps took. Engine thread only.

    Nobody decodes: the whole limit. Otherwise as many tokens as add at most `ADDED_S` to a step,
    from what a token of a prompt has cost of late; the limit until that is known.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: the most tokens of a step, all prompts together."""
        self._limit = limit
        self._decode_s: deque[float] = deque(maxlen=_KEPT)  # of steps without prompts
        self._token_s: deque[float] = deque(maxlen=_KEPT)

    def tokens(self, decoding: bool) -> int:
        """The most tokens of prompts in the next step."""
        if not decoding or len(self._token_s) < _ENOUGH:
            return self._limit
        fits = int(ADDED_S / max(min(self._token_s), 1e-9))
        return min(self._limit, max(LEAST_TOKENS, fits))

    def ran(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if not prefill_tokens:
            self._decode_s.append(seconds)
        elif prefill_tokens >= LEAST_TOKENS:  # the end of a prompt tells little
            usual = min(self._decode_s, default=0.0) if decode_rows else 0.0
            self._token_s.append(max(0.0, seconds - usual) / prefill_tokens)

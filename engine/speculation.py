"""Prompt lookup: drafts of an answer's next tokens, from what the chat has said already.

A model that quotes, corrects code or fills in a form repeats whole passages of its prompt. Where
the last `NGRAM` tokens have occurred before, those that followed them are a draft of what comes
next (Saxena 2023). One step runs the last token and the draft together, and each of their rows
gives the token that would have been sampled there anyhow: the draft counts as far as it is the
same, so that a draft can change the time of an answer and never the answer (Leviathan et al. 2023,
for a draft without probabilities; our noise depends on seed and position alone).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence as Seq
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.memory.page_pool import PAGE_SIZE
from engine.request import Request

Speculating = Literal["auto", "always", "never"]

NGRAM = 3  # tokens that must have occurred before
MAX_DRAFT = 8
MAX_CHATS = 16  # with more rows than this a step gains nothing by a row more, on any CPU we know
MARGIN = 1.25  # by which a draft must be worth more than it costs
FIRST_GUESS = 0.15  # what a row more costs of a step, until that is measured
# Chance that the next token is right, after so many right ones of the same passage in a row; what
# a chat's own text shows outweighs it soon.
RUNS = (0, 1, 2, 4, 8, 16)
CHANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
CHANCE_WEIGHT = 4.0  # tokens that the chances above count for
_KEPT = 8  # measurements; the least of them counts, since others' work on the machine only adds


class PromptLookup:
    """Owns what one chat has said, and where it seems to repeat itself. Engine thread only."""

    def __init__(self, ids: Seq[int]) -> None:
        """ids: all tokens before the answer, those of the shared prefix included."""
        self._ids: npt.NDArray[np.int32] = np.empty(2 * len(ids) + 64, np.int32)
        self._ids[: len(ids)] = ids
        self._count = len(ids)
        self._at = -1  # the token that should come next, as the passage went on; -1: no passage
        self._run = 0  # tokens of the passage that came right
        self._right = [chance * CHANCE_WEIGHT for chance in CHANCES]
        self._tried = [CHANCE_WEIGHT] * len(RUNS)

    def __len__(self) -> int:
        return self._count

    def push(self, token: int) -> None:
        """One more token was sampled, whether it had been drafted or not."""
        if self._at >= 0:
            level = _level(self._run)
            self._tried[level] += 1
            if self._ids[self._at] == token:
                self._right[level] += 1
                self._at += 1
                self._run += 1
            else:
                self._at, self._run = -1, 0
        if self._count == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._count] = token
        self._count += 1

    def draft(self, limit: int, worth: float) -> list[int]:
        """The next tokens if the passage goes on, at most `limit`, as long as one is `worth` it.

        worth: the least chance of being right with which a token is drafted.
        """
        if self._at < 0:
            self._at = self._find()
        if self._at < 0:
            return []
        draft: list[int] = []
        chance = 1.0
        for i in range(limit):
            level = _level(self._run + i)
            chance *= self._right[level] / self._tried[level]
            if chance < worth:
                break
            at = self._at + i  # beyond the end the passage repeats what was just drafted
            draft.append(int(self._ids[at]) if at < self._count else draft[at - self._count])
        return draft

    def _find(self) -> int:
        """Where the latest earlier occurrence of the last tokens goes on; -1: there is none."""
        if self._count <= NGRAM:
            return -1
        ids = self._ids[: self._count]
        last = ids[-NGRAM:]
        ends = np.flatnonzero(ids[NGRAM - 1 : -1] == last[-1])  # + NGRAM - 1
        for back in range(1, NGRAM):
            ends = ends[ids[ends + NGRAM - 1 - back] == last[-1 - back]]
        return int(ends[-1]) + NGRAM if len(ends) else -1


def _level(run: int) -> int:
    return next(i for i in reversed(range(len(RUNS))) if run >= RUNS[i])


class Speculation:
    """Owns each running chat's lookup, and what rows cost this engine. Engine thread only.

    One more row pays when its chance of being right is above its cost, in tokens that the step's
    time is worth: with n chats, `n * seconds of a row / seconds of the step`. Both are taken from
    the engine's own latest steps; the least chance is `MARGIN` times that. So one chat drafts
    nearly always, sixteen only amid long repetitions.
    """

    def __init__(self, choice: Speculating, context_length: int) -> None:
        """`always`: whatever it costs, for all chats; `never`: nothing is drafted."""
        self.drafted = 0  # tokens
        self.accepted = 0
        self._choice = choice
        self._context_length = context_length
        self._plain_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._row_s: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._lookups: dict[str, PromptLookup] = {}

    def drafts(self, requests: Seq[Request]) -> dict[Request, list[int]]:
        """Drafts for those of a step's decoding requests whose next tokens can be foreseen.

        A draft ends before the page does: whole pages go to disk, and their tokens are final.
        """
        if self._choice == "never":
            return {}
        if self._choice == "auto" and len(requests) > MAX_CHATS:
            return {}
        worth = self._worth(len(requests))
        if worth is None:
            return {}
        found: dict[Request, list[int]] = {}
        for request in requests:
            if request.shaping is not None:  # its rules change with each token
                continue
            lookup = self._caught_up(request)
            seq = request.sequence
            room = min(
                MAX_DRAFT,
                PAGE_SIZE - 1 - len(seq.ids) % PAGE_SIZE,
                request.sampling.max_tokens - len(request.output) - 1,
                self._context_length - seq.position - len(seq.ids) - 1,
            )
            draft = lookup.draft(room, worth)
            if draft:
                found[request] = draft
        return found

    def ran(self, num_chats: int, drafted: int, seconds: float) -> None:
        """A step that read no prompt took so long, with a row for each chat and drafted token."""
        plain = self._plain_s[num_chats]
        if not drafted:
            plain.append(seconds)
        elif plain:
            self._row_s[num_chats].append(max(0.0, seconds - min(plain)) / drafted)

    def verified(self, drafted: int, accepted: int) -> None:
        """So many tokens of a draft were what the model chose."""
        self.drafted += drafted
        self.accepted += accepted

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._lookups.pop(request_id, None)

    def _worth(self, num_chats: int) -> float | None:
        """The least chance with which a token is drafted; None while a step's time is unknown."""
        if self._choice == "always":
            return 0.0
        plain = self._plain_s[num_chats]
        if not plain:
            return None
        step_s = min(plain)
        row_s = min(self._row_s[num_chats], default=FIRST_GUESS * step_s / num_chats)
        return MARGIN * num_chats * row_s / step_s

    def _caught_up(self, request: Request) -> PromptLookup:
        lookup = self._lookups.get(request.id)
        known = len(request.submit.prefix_ids) + len(request.prompt)
        if lookup is None:
            lookup = self._lookups[request.id] = PromptLookup(
                [*request.submit.prefix_ids, *request.prompt]
            )
        for token in request.output[len(lookup) - known :]:
            lookup.push(token)
        return lookup

"""Prompt lookup: drafts of an answer's next tokens, from what the chat has said already.

A model that quotes, corrects code or fills in a form repeats whole passages of its prompt. Where
the last `NGRAM` tokens have occurred before, those that followed them are a draft of what comes
next (Saxena 2023). One step runs the last token and the draft together, and each of their rows
gives the token that would have been sampled there anyhow: the draft counts as far as it is the
same, so that a draft can change the time of an answer and never the answer (Leviathan et al. 2023,
for a draft without probabilities; our noise depends on seed and position alone).
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.memory.page_pool import PAGE_SIZE
from engine.request import Request

Speculating = Literal["auto", "always", "never"]
Draft = list[tuple[int, float]]  # tokens, each with its chance that all up to it are right

NGRAM = 3  # tokens that must have occurred before
MAX_DRAFT = 8
MAX_CHATS = 16  # with more rows than this a step gains nothing by a row more, on any CPU we know
MARGIN = 1.25  # by which a draft must be worth more than it costs
OTHERS = 0.1  # that drafts may add to the time between the tokens of chats without one
FORGET = 256  # steps without a draft, after which its cost is measured anew
FIRST_GUESS = 0.15  # what a row more costs of a step, until that is measured
# Chance that the next token is right, after so many right ones of the same passage in a row; what
# a chat's own text shows outweighs it soon.
RUNS = (0, 1, 2, 4, 8, 16)
CHANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
CHANCE_WEIGHT = 4.0  # tokens that the chances above count for
_KEPT = 8  # measurements


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

    def draft(self, limit: int, worth: float) -> Draft:
        """The next tokens if the passage goes on, at most `limit`, as long as one is `worth` it.

        worth: the least chance of being right with which a token is drafted.
        """
        if self._at < 0:
            self._at = self._find()
        if self._at < 0:
            return []
        draft: Draft = []
        chance = 1.0
        for i in range(limit):
            level = _level(self._run + i)
            chance *= self._right[level] / self._tried[level]
            if chance < worth:
                break
            at = self._at + i  # beyond the end the passage repeats what was just drafted
            known = at < self._count
            draft.append((int(self._ids[at]) if known else draft[at - self._count][0], chance))
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


class _Times:
    """Owns what the latest steps of a number of chats took, with drafts and without."""

    def __init__(self) -> None:
        self._plain_s: deque[float] = deque(maxlen=_KEPT)
        self._drafted: deque[tuple[int, float]] = deque(maxlen=2 * _KEPT)  # rows, seconds more
        self._plain_in_a_row = 0

    def ran(self, drafted: int, seconds: float) -> None:
        if not drafted:
            self._plain_s.append(seconds)
            self._plain_in_a_row += 1
            if self._plain_in_a_row == FORGET:
                self._drafted.clear()
            return
        self._plain_in_a_row = 0
        if self._plain_s:
            usual = self.step_s
            more = min(seconds - usual, 2 * usual)  # what is beyond was another program's
            self._drafted.append((drafted, more))

    @property
    def known(self) -> bool:
        return bool(self._plain_s)

    @property
    def step_s(self) -> float:
        """Of a step without drafts."""
        return statistics.median(self._plain_s)

    def row_s(self, num_chats: int) -> float:
        """Of one drafted token more."""
        if not self._drafted:
            return FIRST_GUESS * self.step_s / num_chats
        rows = sum(rows for rows, _ in self._drafted)
        return max(0.0, sum(more for _, more in self._drafted)) / rows


class Speculation:
    """Owns each running chat's lookup, and what rows cost this engine. Engine thread only.

    One more row pays when its chance of being right is above its cost, in tokens that the step's
    time is worth: with n chats, `n * seconds of a row / seconds of the step`. Both are taken from
    the engine's own latest steps; the least chance is `MARGIN` times that. While some chat has no
    draft, the others' may make its tokens slower by `OTHERS` at most. So one chat drafts nearly
    always, several where a row costs little, many only amid long repetitions.
    """

    def __init__(self, choice: Speculating, context_length: int) -> None:
        """`always`: whatever it costs, for all chats; `never`: nothing is drafted."""
        self.drafted = 0  # tokens
        self.accepted = 0
        self._choice = choice
        self._context_length = context_length
        self._times: dict[int, _Times] = defaultdict(_Times)  # by the number of chats
        self._lookups: dict[str, PromptLookup] = {}

    def drafts(self, requests: Seq[Request]) -> dict[Request, list[int]]:
        """Drafts for those of a step's decoding requests whose next tokens can be foreseen.

        A draft ends before the page does: whole pages go to disk, and their tokens are final.
        """
        count = len(requests)
        if self._choice == "never" or (self._choice == "auto" and count > MAX_CHATS):
            return {}
        times = self._times[count]
        worth = 0.0
        if self._choice == "auto":
            if not times.known:
                return {}
            worth = MARGIN * count * times.row_s(count) / times.step_s
        found: dict[Request, Draft] = {}
        for request in requests:
            if request.shaping is not None:  # its rules change with each token
                continue
            seq = request.sequence
            room = min(
                MAX_DRAFT,
                PAGE_SIZE - 1 - len(seq.ids) % PAGE_SIZE,
                request.sampling.max_tokens - len(request.output) - 1,
                self._context_length - seq.position - len(seq.ids) - 1,
            )
            draft = self._caught_up(request).draft(room, worth)
            if draft:
                found[request] = draft
        if self._choice == "auto" and len(found) < count:
            row_s = times.row_s(count)
            most = int(OTHERS * times.step_s / row_s) if row_s else MAX_DRAFT * count
            found = _likeliest(found, most)
        return {request: [token for token, _ in draft] for request, draft in found.items()}

    def ran(self, num_chats: int, drafted: int, seconds: float) -> None:
        """A step that read no prompt took so long, with a row for each chat and drafted token."""
        self._times[num_chats].ran(drafted, seconds)

    def verified(self, drafted: int, accepted: int) -> None:
        """So many tokens of a draft were what the model chose."""
        self.drafted += drafted
        self.accepted += accepted

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._lookups.pop(request_id, None)

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


def _likeliest(drafts: Mapping[Request, Draft], most: int) -> dict[Request, Draft]:
    """The beginnings of drafts that hold the `most` likeliest tokens of all."""
    chances = sorted((chance for draft in drafts.values() for _, chance in draft), reverse=True)
    if len(chances) <= most:
        return dict(drafts)
    least = chances[most]  # the first that has no place, nor those like it
    kept = {
        request: [(token, chance) for token, chance in draft if chance > least]
        for request, draft in drafts.items()
    }
    return {request: draft for request, draft in kept.items() if draft}

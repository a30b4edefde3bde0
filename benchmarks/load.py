"""A load of chats for a chat server, drawn from a seed: who writes what, how much comes back, when.

Lengths follow public chat logs (ShareGPT, LMSYS-Chat-1M): about 70 tokens of a question and 360 of
an answer on average, log-normal with a long tail; between two turns of a chat lies an idle gap.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp, log

COMMON = (
    "the a of and to in that for with on as at by from we you it this which what how why when "
    "where every some long short old new good small large river city house road letter number "
    "paper music bread water light winter summer year question answer reason example part list "
    "table day hour people teacher child friend work read write explain compare describe"
)
WORDS = tuple(COMMON.split())


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One turn: a question of about `words` words, an answer of exactly `tokens` tokens."""

    question: str
    tokens: int
    gap_s: float  # idle time before it; of the first turn, the time until the chat arrives


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a load is; means in tokens and seconds."""

    chats: int
    turns: int
    question_tokens: float = 70.0
    answer_tokens: float = 360.0
    spread: float = 0.8  # sigma of the logarithm
    max_answer: int = 1536
    max_question: int = 600
    gap_s: float = 8.0
    arrival_s: float = 0.5  # between two chats' first turns


def draw(shape: Shape, seed: int) -> list[list[Exchange]]:
    """The turns of each chat; the same for the same seed."""
    dice = random.Random(seed)
    chats = []
    arrival = 0.0
    for _ in range(shape.chats):
        turns = []
        for number in range(shape.turns):
            words = _length(dice, shape.question_tokens, shape.spread, shape.max_question)
            tokens = _length(dice, shape.answer_tokens, shape.spread, shape.max_answer)
            gap = arrival if number == 0 else dice.expovariate(1 / shape.gap_s)
            turns.append(Exchange(question=_question(dice, words), tokens=tokens, gap_s=gap))
        chats.append(turns)
        arrival += dice.expovariate(1 / shape.arrival_s)
    return chats


def _length(dice: random.Random, mean: float, spread: float, most: int) -> int:
    """Log-normal with this mean, at least 4 and at most `most`."""
    return max(4, min(most, round(exp(dice.gauss(log(mean) - spread**2 / 2, spread)))))


def _question(dice: random.Random, words: int) -> str:
    """Common short words, which are a token each."""
    return " ".join(dice.choice(WORDS) for _ in range(words)).capitalize() + "?"

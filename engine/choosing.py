"""The tokens that a step's rows of logits give: one an answer, more where a draft was right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.batch import Segment
from engine.messages import TokenLogprobs
from engine.model.logprobs import token_logprobs
from engine.model.sampler import sample
from engine.request import Request, Work


@dataclass(frozen=True)
class Chosen:
    """What an answer goes on with: the draft as far as it was right, and the token behind it.

    The K/V of the rest of the draft, and what was staged of it, are written again by later steps.
    """

    request: Request
    segment: Segment
    tokens: list[int]
    scores: list[TokenLogprobs | None]


def choose(rows: Sequence[Segment], work: Mapping[Segment, Work], logits: Tensor) -> list[Chosen]:
    """Sample each row of logits [num_rows, vocab_size] for the request whose segment it is of.

    The rows of a segment with a draft are side by side; each has the position, and so the noise,
    of the token that would be sampled there without a draft.
    """
    requests: list[Request] = []
    positions: list[int] = []
    for row, segment in enumerate(rows):
        request = work[segment]
        assert isinstance(request, Request), "a row of logits that nobody asked for"
        requests.append(request)
        again = row > 0 and rows[row - 1] is segment
        positions.append(positions[-1] + 1 if again else segment.seq.position + len(segment.seq))
    sampled = sample(
        logits,
        [r.sampling for r in requests],
        positions,
        [r.shaping for r in requests],
        [r.submit.candidate for r in requests],
    )
    scores = token_logprobs(logits, sampled, [r.submit.top_logprobs for r in requests])
    tokens: list[int] = sampled.tolist()
    chosen: list[Chosen] = []
    row = 0
    while row < len(rows):
        draft = rows[row].draft
        right = 0
        while right < len(draft) and draft[right] == tokens[row + right]:
            right += 1
        stop = row + right + 1
        chosen.append(Chosen(requests[row], rows[row], tokens[row:stop], scores[row:stop]))
        row += 1 + len(draft)
    return chosen

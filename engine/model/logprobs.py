"""How likely the model held each chosen token, and the likeliest ones beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.messages import TokenLogprobs


def token_logprobs(
    logits: Tensor, tokens: npt.NDArray[np.int64], tops: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """For each row that asks for it (its `tops` is not None) the logarithms of probabilities.

    `logits` [batch, vocab_size] fp32 as the model gave them; `tokens` [batch], the ones chosen.
    The likeliest tokens come best first, the lower id first among equals.
    """
    found: list[TokenLogprobs | None] = [None] * len(tops)
    for index, top in enumerate(tops):
        if top is None:
            continue
        row = logits[index].detach().to("cpu", torch.float32).numpy().astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        best: list[tuple[int, float]] = []
        if top:
            # Many tokens may tie with the last one that has a place: the lower ids get it.
            least = np.partition(row, len(row) - min(top, len(row)))[len(row) - min(top, len(row))]
            ids = np.flatnonzero(row >= least)
            ids = ids[np.lexsort((ids, -row[ids]))][:top]
            best = [(int(i), float(row[i])) for i in ids]
        found[index] = TokenLogprobs(float(row[tokens[index]]), best)
    return found

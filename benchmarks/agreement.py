"""Whether two sides computed the same thing; if they did not, nothing may be reported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.report import Refused

# KL divergence of the next-token distributions, nats: of a row, and the mean of many; and the lead
# of a side's best token over the other side's choice, in probability, above which two different
# choices are no tie. In bf16, 32 rows behind 6,000 tokens that were read 64 or 256 at a time
# instead of 512 have means of 7e-4 to 2e-3; single ones come to 3e-2, another text to several nats.
MAX_KL = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MAX_ROW_KL = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
MANY_ROWS = 16
MAX_LEAD = {torch.float32: 1e-3, torch.bfloat16: 0.15}
MIN_SAME_CHOICES = 0.5  # of two engines that compute in different precisions


def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """KL(theirs || ours) of each row, nats; logits [rows, vocab_size] fp32."""
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)


def check_logits(what: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    """The rows' mean divergence. Raises Refused when it, a row or a choice is out of tolerance.

    ours, theirs [rows, vocab_size] fp32, after the same token ids.
    """
    if not (torch.isfinite(ours).all() and torch.isfinite(theirs).all()):
        raise Refused(f"{what}: there are logits that are not finite")
    rows = divergence(ours, theirs)
    mean, largest = float(rows.mean()), float(rows.max())
    for name, found, most in (
        ("mean", mean, MAX_KL[dtype] if len(rows) >= MANY_ROWS else MAX_ROW_KL[dtype]),
        ("largest", largest, MAX_ROW_KL[dtype]),
    ):
        if found > most:
            raise Refused(f"{what}: {name} KL divergence {found:.2e} nats, at most {most:.0e}")
    chosen = ours.argmax(-1, keepdim=True)
    probabilities = theirs.softmax(-1)
    lead = float((probabilities.amax(-1, keepdim=True) - probabilities.gather(-1, chosen)).max())
    if lead > MAX_LEAD[dtype]:
        raise Refused(f"{what}: greedy choices differ where one leads by {lead:.3f} in probability")
    return mean


def same_choices(what: str, ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Share of rows whose first greedy token is the same. Raises Refused when it is too low.

    Other precisions turn ties, and some more; another model, prompt or position hardly ever
    agrees.
    """
    share = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    if share < MIN_SAME_CHOICES:
        raise Refused(
            f"{what}: the first greedy tokens agree with ours in {share:.0%} of the rows, "
            f"at least {MIN_SAME_CHOICES:.0%} are needed"
        )
    return share

"""Whether two sides computed the same thing; if they did not, nothing may be reported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.report import Refused

# Mean KL divergence of the next-token distributions, nats; and the lead of a side's best token over
# the other side's choice, in probability, above which two different choices are no tie. In bf16, 32
# rows behind 6,000 tokens that were read 64 or 256 at a time instead of 512 have means of 7e-4 to
# 2e-3; single rows come to 3e-2, and beyond the model's context to 2e-1; another text to several
# nats.
MAX_KL = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MAX_KL_OF_FEW = {torch.float32: 1e-5, torch.bfloat16: 1e-1}
MANY_ROWS = 16
MAX_LEAD = {torch.float32: 1e-3, torch.bfloat16: 0.15}
EXEMPT = 0.01  # of the rows
MIN_SAME_CHOICES = 0.5  # of two engines that compute in different precisions


def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """KL(theirs || ours) of each row, nats; logits [rows, vocab_size] fp32."""
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)


class Agreement:
    """Whether two sides' logits agree, over all the rows that were added."""

    def __init__(self, what: str, dtype: torch.dtype) -> None:
        self._what, self._dtype = what, dtype
        self._kl: list[Tensor] = []
        self._leads: list[Tensor] = []

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        """Rows of both, [rows, vocab_size] fp32, after the same token ids. Raises Refused."""
        if not (torch.isfinite(ours).all() and torch.isfinite(theirs).all()):
            raise Refused(f"{self._what}: there are logits that are not finite")
        self._kl.append(divergence(ours, theirs))
        chosen = ours.argmax(-1, keepdim=True)
        odds = theirs.softmax(-1)
        self._leads.append(odds.amax(-1) - odds.gather(-1, chosen)[:, 0])

    def check(self) -> float:
        """The rows' mean divergence. Raises Refused when it, or the choices, are out of tolerance.

        Beyond the tolerance of a choice may be one row of a hundred.
        """
        kl, leads = torch.cat(self._kl), torch.cat(self._leads)
        mean = float(kl.mean())
        most = (MAX_KL if len(kl) >= MANY_ROWS else MAX_KL_OF_FEW)[self._dtype]
        if mean > most:
            raise Refused(f"{self._what}: KL divergence {mean:.2e} nats, at most {most:.0e}")
        apart = int((leads > MAX_LEAD[self._dtype]).sum())
        if apart > EXEMPT * len(leads):
            raise Refused(
                f"{self._what}: in {apart} of {len(leads)} rows the greedy choices differ where "
                f"one leads, by up to {float(leads.max()):.3f} in probability"
            )
        return mean


def check_logits(what: str, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> float:
    """The mean divergence of these rows alone, as `Agreement` has it. Raises Refused."""
    agreement = Agreement(what, dtype)
    agreement.add(ours, theirs)
    return agreement.check()


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

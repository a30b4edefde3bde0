"""All that changes a request's logits before a token is chosen from them."""

from __future__ import annotations

import numpy as np

from engine.messages import Submit
from engine.model.constraints import Constraint, Grammars
from engine.model.sampler import PenaltyState, Row


class Shaping:
    """Penalties, then bias, then the grammar; owned by one request. Engine thread only."""

    def __init__(
        self,
        penalty: PenaltyState | None,
        bias: dict[int, float],
        constraint: Constraint | None,
    ) -> None:
        self._penalty = penalty
        self._bias_ids = np.fromiter(bias, np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._constraint = constraint

    @classmethod
    def for_request(cls, submit: Submit, grammars: Grammars) -> Shaping | None:
        """None when nothing is changed. Raises ValueError for a grammar that is not valid."""
        prompt = [*submit.prefix_ids, *submit.history_ids, *submit.new_ids]
        penalty = PenaltyState.for_request(submit.sampling, prompt)
        constraint = grammars.constraint(submit.grammar) if submit.grammar else None
        if penalty is None and constraint is None and not submit.logit_bias:
            return None
        return cls(penalty, submit.logit_bias, constraint)

    def push(self, token_id: int) -> None:
        """One more token of the answer."""
        if self._penalty is not None:
            self._penalty.push(token_id)
        if self._constraint is not None:
            self._constraint.push(token_id)

    @property
    def fault(self) -> str:
        """Why the answer cannot be gone on with; "" while it can."""
        return "" if self._constraint is None else self._constraint.fault

    def apply(self, row: Row) -> None:
        """Change the logits; `row` [vocab_size] fp32, written."""
        if self._penalty is not None:
            self._penalty.apply(row)
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias
        if self._constraint is not None:
            self._constraint.apply(row)

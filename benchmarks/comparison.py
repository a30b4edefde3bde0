"""One row of a comparison of decode steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.floors import Precision, decode_floor_s
from benchmarks.machine import Peak
from benchmarks.report import Row, floor_shares
from engine.model.model_config import ModelConfig


@dataclass(frozen=True)
class Comparison:
    """Median seconds of a step of both sides."""

    batch: int
    prefix: int
    suffix: float  # the mean over the timed steps
    ours_s: float
    theirs_s: float
    notes: Row = field(default_factory=dict)  # keys of this comparison alone

    def row(
        self, model: str, config: ModelConfig, peak: Peak, ours: Precision, theirs: Precision
    ) -> Row:
        """The contract's row, with each side's share of its floor.

        Ours reads the prefix once, theirs once a row. Products with weights of at most 8 bits are
        held against the GEMM peak of bytes, all others against that of our dtype.
        """

        def floor_s(precision: Precision, shared: bool) -> float:
            return decode_floor_s(
                config,
                precision,
                peak,
                batch=self.batch,
                prefix=self.prefix,
                suffix=self.suffix,
                shared=shared,
            )

        return {
            "model": model,
            "batch": self.batch,
            "prefix": self.prefix,
            "suffix": round(self.suffix),
            "ratio": round(self.theirs_s / self.ours_s, 3),
            "ours_tok_s": round(self.batch / self.ours_s, 1),
            "theirs_tok_s": round(self.batch / self.theirs_s, 1),
            **floor_shares(
                floor_s(ours, True) / self.ours_s, floor_s(theirs, False) / self.theirs_s
            ),
            **self.notes,
        }

"""What the formats of a model's weights cost and keep, and which of them is taken. Torch-free."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

WeightFormat = Literal["fp32", "bf16", "int8", "int4"]
MAX_LOSS_RISE = 0.005  # of the loss on the sample text, over fp32's
MIN_AGREEMENT = 0.95  # of the likeliest next tokens with fp32's
TIMING_NOISE = 1.05  # a format this much slower than another may be as fast


class FormatFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One format: how near to fp32 its answers are, and what it costs here."""

    format: WeightFormat
    loss: float  # nats a token
    agreement: float  # share of positions whose likeliest next token is fp32's
    step_s: tuple[float, ...]  # all projections and the head, by rows
    num_bytes: int  # of projections and head


class WeightFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All formats of one model on one machine; the plain one, of the dtype, is the first."""

    fp32_loss: float
    tokens: int  # of the sample text
    rows: tuple[int, ...]
    formats: tuple[FormatFigures, ...]
    undisturbed: float = 1.0  # share of the timing that other programs left

    def rise(self, figures: FormatFigures) -> float:
        """By how much of itself the loss is higher than in fp32."""
        return figures.loss / self.fp32_loss - 1

    def why_not(self, figures: FormatFigures) -> str | None:
        """Why a format is not taken of itself; None where it may be."""
        plain = self.formats[0]
        if figures == plain:
            return None
        if self.rise(figures) > MAX_LOSS_RISE:
            return f"its loss is more than {MAX_LOSS_RISE:.1%} higher"
        if figures.agreement < MIN_AGREEMENT:
            return f"it agrees with fp32 on fewer than {MIN_AGREEMENT:.0%} of the tokens"
        slower = [
            rows
            for rows, own, other in zip(self.rows, figures.step_s, plain.step_s, strict=True)
            if own > TIMING_NOISE * other
        ]
        return f"it is slower than {plain.format} at {slower[0]} rows" if slower else None

    def best(self) -> FormatFigures:
        """The fastest of the formats that keep the model's answers, over all numbers of rows."""
        allowed = [figures for figures in self.formats if self.why_not(figures) is None]
        return min(allowed, key=lambda figures: sum(math.log(s) for s in figures.step_s))

    def lines(self) -> list[str]:
        """The figures as text, for people."""
        best = self.best()
        lines = []
        for figures in self.formats:
            times = ", ".join(
                f"{s * 1e3:.1f} ms at {n}" for n, s in zip(self.rows, figures.step_s, strict=True)
            )
            verdict = "taken" if figures == best else self.why_not(figures) or "slower"
            lines.append(
                f"{figures.format}: loss {self.rise(figures):+.2%} and {figures.agreement:.1%} of "
                f"tokens as in fp32; projections {times} rows; "
                f"{figures.num_bytes / (1 << 20):.0f} MiB; {verdict}"
            )
        return lines

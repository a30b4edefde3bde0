"""How the layers of a history came back: run by run of tokens, in words, and at the very least."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.floors import RestoreCosts
from engine.restoration.plan import METHODS, RestoredPart


def with_recomputed(
    parts: Sequence[RestoredPart], position: int, num_tokens: int, num_layers: int
) -> list[RestoredPart]:
    """The parts in order, and what lies between them as computed anew, all layers.

    Of `num_tokens` tokens, the first of which is at `position`.
    """
    out: list[RestoredPart] = []
    at = position
    end = RestoredPart(position + num_tokens, 0, 0, 0, 0, 0)
    for part in (*parts, end):
        if part.start > at:
            out.append(RestoredPart(at, part.start - at, num_layers, 0, 0, 0))
        if part.num_tokens:
            out.append(part)
        at = part.start + part.num_tokens
    return out


def floor_s(parts: Sequence[tuple[RestoreCosts, RestoredPart]]) -> float:
    """Least seconds of a restore of these parts: all their compute, or all their reads."""
    compute = sum(p.recompute * c.c_layer + p.hidden * c.c_hidden for c, p in parts)
    # of the projected layers, one has its input at hand
    io = sum(max(0, p.hidden - 1) * c.io_hidden + p.kv * c.io_kv for c, p in parts)
    return max(compute, io)


def plan_text(parts: Sequence[RestoredPart]) -> str:
    """How many layers came back in which way; by tokens where not all did in the same."""
    texts = []
    for part in parts:
        counts = zip(METHODS, (part.recompute, part.hidden, part.kv), strict=True)
        text = " + ".join(f"{count} {method}" for method, count in counts if count)
        texts.append(text if len(parts) == 1 else f"{text} for {part.num_tokens} tokens")
    return ", ".join(texts)

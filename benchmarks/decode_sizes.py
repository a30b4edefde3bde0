"""How much `benchmarks.decode` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; lengths in tokens."""

    batches: tuple[int, ...]
    prefixes: tuple[int, ...]  # ascending; each gives its rows
    peer_batches: tuple[int, ...]  # with the longest of the prefixes that peers are given
    peer_prefix: int
    flat_batches: tuple[int, ...]
    flat: tuple[int, int]  # short and long
    suffix: int
    steps: int
    peer_steps: int
    row_s: float  # a row ends after this time, though not before MIN_STEPS steps
    mha_batches: tuple[int, ...]  # multi-head attention; none: not measured
    mha_prefixes: tuple[int, ...]
    engine_batches: tuple[int, ...]  # beside other engines, when they are asked for
    engine_prefixes: tuple[int, ...]
    engine_steps: int  # of a round
    engine_rounds: int

    @property
    def most_rows(self) -> int:
        return max(
            *self.batches,
            *self.peer_batches,
            *self.flat_batches,
            *self.mha_batches,
            *self.engine_batches,
        )

    @property
    def longest_prefix(self) -> int:
        return max(
            *self.prefixes,
            self.peer_prefix,
            *self.flat,
            *self.mha_prefixes,
            *self.engine_prefixes,
        )

    @property
    def longest_suffix(self) -> int:
        return self.suffix + max(self.steps, self.peer_steps, self.engine_steps) + 2


QUICK = Sizes(
    batches=(1, 8, 32),
    prefixes=(64, 2048),
    peer_batches=(8, 32),
    peer_prefix=2048,
    flat_batches=(32,),
    flat=(64, 2048),
    suffix=32,
    steps=8,
    peer_steps=3,
    row_s=1.5,
    mha_batches=(),
    mha_prefixes=(),
    engine_batches=(1, 8, 32),
    engine_prefixes=(0, 2048),
    engine_steps=8,
    engine_rounds=2,
)
FULL = Sizes(
    batches=(1, 2, 4, 8, 32),
    prefixes=(0, 64, 512, 1024, 2048, 4096, 8192),
    peer_batches=(1, 8, 32),
    peer_prefix=2048,
    flat_batches=(8, 32),
    flat=(512, 8192),
    suffix=64,
    steps=24,
    peer_steps=6,
    row_s=20.0,
    mha_batches=(1, 8, 32),
    mha_prefixes=(64, 512, 2048),
    engine_batches=(1, 8, 32),
    engine_prefixes=(64, 2048),
    engine_steps=24,
    engine_rounds=4,
)

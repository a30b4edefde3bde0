"""How much `benchmarks.resume` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; lengths in tokens."""

    tokens: tuple[int, ...]  # of the chats' own histories
    mha_tokens: tuple[int, ...]  # with multi-head attention; empty: it is left out
    max_prefix: int  # the default assistant's prompt is cut to this
    mbps: tuple[int, ...]  # throttled speeds
    rounds: int  # at the disk's own speed
    throttled_rounds: int
    recompute_rounds: int  # 0: the first one after the restart counts
    raw_bytes: int


QUICK = Sizes(
    tokens=(2600,),
    mha_tokens=(),
    max_prefix=256,
    mbps=(125, 500),
    rounds=2,
    throttled_rounds=1,
    recompute_rounds=0,
    raw_bytes=64 << 20,
)
FULL = Sizes(
    tokens=(256, 1024, 2600, 6000),
    mha_tokens=(256, 1024, 2600),
    max_prefix=4096,
    mbps=(125, 500),
    rounds=5,
    throttled_rounds=3,
    recompute_rounds=1,
    raw_bytes=512 << 20,
)

"""One generation: what was asked, how far it is, and what it cost."""

from __future__ import annotations

import enum
import statistics
import time
from typing import TYPE_CHECKING

from engine.memory.prefix_tree import NodeState, PrefixNode
from engine.memory.sequence import Sequence
from engine.messages import Submit, TurnStats

if TYPE_CHECKING:
    from engine.model.output import OutputText
    from engine.model.shaping import Shaping
    from engine.restoration.restore import RestoreJob


def now() -> float:
    """Monotonic seconds, the clock of every figure here."""
    return time.perf_counter()


class State(enum.Enum):
    WAITING = "waiting"  # holds nothing
    RESTORING = "restoring"  # holds pages; chunks are being read
    PREFILL = "prefill"  # tokens without K/V remain
    DECODE = "decode"  # only the last sampled token has no K/V


class Timing:
    """When things happened to a request; seconds of `now()`."""

    def __init__(self, received: float) -> None:
        self.received = received
        self.admitted: float | None = None
        self.prefill_began: float | None = None
        self.first_token: float | None = None
        self.tokens: list[float] = []


class Work:
    """A sequence on its way to having K/V for all its tokens. Scheduler and engine thread only.

    First `restore` brings back what is on disk, then the ranges of `todo` are computed.
    """

    def __init__(self) -> None:
        self.state = State.WAITING
        self.path: list[PrefixNode] = []  # shared nodes before its own tokens, from the root
        self.tail: PrefixNode | None = None  # whose sequence this work extends
        self.restore: RestoreJob | None = None
        self.todo: list[tuple[int, int]] = []  # half-open ranges of seq that still need K/V

    @property
    def sequence(self) -> Sequence:
        """The sequence of work that was admitted."""
        assert self.tail is not None, "work without a sequence was scheduled"
        return self.tail.seq

    @property
    def blocked(self) -> bool:
        """Whether a node before its tokens has no K/V yet."""
        return any(node.state is not NodeState.READY for node in self.path)

    def computed(self, end: int) -> None:
        """The first range of `todo` is computed up to `end`."""
        seq = self.sequence
        _, stop = self.todo[0]
        if end < stop:
            self.todo[0] = (end, stop)
        else:
            self.todo.pop(0)
        seq.num_computed = self.todo[0][0] if self.todo else len(seq.ids)


class NodeLoad(Work):
    """Brings a node of a prefix into memory, on behalf of the first request that needs it."""

    def __init__(
        self, target: PrefixNode, path: list[PrefixNode], requester: Request | None
    ) -> None:
        super().__init__()
        self.path = path
        self.tail = target
        self.requester = requester


class WarmLoad(Work):
    """Brings a chat back before its next message; only what is on disk."""

    def __init__(self, chat_id: str) -> None:
        super().__init__()
        self.chat_id = chat_id
        self.prefix_digest = b""


class Request(Work):
    """Owns one generation's state. Scheduler and engine thread only."""

    def __init__(self, submit: Submit, received: float) -> None:
        super().__init__()
        self.id = submit.request_id
        self.chat_id = submit.chat_id
        self.submit = submit
        self.sampling = submit.sampling
        self.prompt = [*submit.history_ids, *submit.new_ids]
        self.output: list[int] = []
        self.text: OutputText | None = None
        self.shaping: Shaping | None = None
        self.history_end = min(submit.history_computed, len(self.prompt) - 1)
        # what the record of the turn needs
        self.timing = Timing(received)
        self.restore_ms = 0.0
        self.restore_io_ms = 0.0
        self.restore_compute_ms = 0.0
        self.restore_bytes = 0
        self.restore_method = ""
        self.restore_plan = ""
        self.restore_predicted_ms: float | None = None
        self.restored_from_memory = 0
        self.restore_spans: list[tuple[str, float, float, int, int]] = []
        self.resident_tokens = 0
        self.restored_tokens = 0
        self.recomputed_tokens = 0
        self.prefix_restored_tokens = 0
        self.prefix_computed_tokens = 0
        self.preemptions = 0
        self.decode_steps = 0
        self.decode_rows = 0

    @property
    def position(self) -> int:
        """Position of the request's first private token: the length of its prefix."""
        return len(self.submit.prefix_ids)

    @property
    def ids(self) -> list[int]:
        """All private token ids: the prompt and what was sampled."""
        return self.prompt + self.output

    def stats(self, ended: float) -> TurnStats:
        """The latency record, milliseconds."""
        t = self.timing
        gaps = [(b - a) * 1e3 for a, b in zip(t.tokens, t.tokens[1:], strict=False)]
        prompt = len(self.prompt)
        reused = self.resident_tokens + self.restored_tokens + self.recomputed_tokens
        first = t.first_token
        return TurnStats(
            queue_ms=((t.admitted or ended) - t.received) * 1e3,
            restore_ms=self.restore_ms,
            restore_io_ms=self.restore_io_ms,
            restore_compute_ms=self.restore_compute_ms,
            restore_method=self.restore_method,
            restore_bytes=self.restore_bytes,
            prefill_ms=((first or ended) - t.prefill_began) * 1e3 if t.prefill_began else 0.0,
            ttft_ms=None if first is None else (first - t.received) * 1e3,
            itl_p50_ms=statistics.median(gaps) if gaps else None,
            itl_p95_ms=percentile(gaps, 95) if gaps else None,
            total_ms=(ended - t.received) * 1e3,
            tokens_in=self.position + prompt,
            tokens_out=len(self.output),
            prefix_tokens=self.position,
            resident_tokens=self.resident_tokens,
            restored_tokens=self.restored_tokens,
            recomputed_tokens=self.recomputed_tokens,
            new_tokens=prompt - reused,
            batch_size=self.decode_rows / self.decode_steps if self.decode_steps else 0.0,
            prefix_restored_tokens=self.prefix_restored_tokens,
            prefix_computed_tokens=self.prefix_computed_tokens,
            preemptions=self.preemptions,
            restore_plan=self.restore_plan,
            restore_predicted_ms=self.restore_predicted_ms,
            restored_from_memory=self.restored_from_memory,
            restore_spans=self.restore_spans,
        )


def percentile(values: list[float], percent: int) -> float:
    """The nearest-rank percentile of a non-empty list."""
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[max(rank, 1) - 1]

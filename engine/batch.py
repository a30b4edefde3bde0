"""What one step runs: rows of tokens, where their K/V go, and what they attend to."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.memory.page_pool import PAGE_SIZE
from engine.memory.prefix_tree import PrefixNode
from engine.memory.sequence import Sequence

Path = tuple[PrefixNode, ...]


@dataclass(frozen=True, eq=False)  # a key of dicts in every step: itself, not its fields
class Segment:
    """Tokens [start, end) of a sequence to be run; a decode segment has one, its last.

    The last ones may be a draft, which the sequence does not hold: the token before it and each of
    its own then give a row of logits.
    """

    seq: Sequence
    path: Path  # nodes before the sequence, from the root
    start: int
    end: int
    wants_logits: bool  # of its last token
    draft: tuple[int, ...] = ()


@dataclass(frozen=True)
class Batch:
    """One step. Rows [0, num_decode) are decode rows, one a sequence; the rest is prefill.

    A sequence with a draft counts as prefill: it has several rows.

    Segments are ordered so that the rows of a node are contiguous where they can be: decode rows
    by path, then prefill rows by path in the opposite order, so that the nodes in the middle have
    one run of rows.
    """

    segments: tuple[Segment, ...]
    first_rows: tuple[int, ...]  # of each segment
    num_decode: int
    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slots: Tensor  # int64 [num_tokens]
    logit_rows: Tensor  # int64 [num_logits]
    logit_segments: tuple[Segment, ...]  # one for each row of logits

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def by_path(
    segments: Seq[Segment], order: dict[PrefixNode, int], *, reverse: bool = False
) -> list[Segment]:
    """Segments with equal beginnings of their paths side by side; nodes in order of appearance.

    Segments of one path keep their order, also in reverse.
    """
    for segment in segments:
        for node in segment.path:
            order.setdefault(node, len(order))
    return sorted(segments, key=lambda s: [order[node] for node in s.path], reverse=reverse)


def build_batch(decode: Seq[Segment], prefill: Seq[Segment]) -> Batch:
    """Lay out one step's rows.

    Raises ValueError when there is nothing to run.
    """
    if not decode and not prefill:
        raise ValueError("a step needs at least one segment")
    order: dict[PrefixNode, int] = {}
    decode = by_path(decode, order)
    prefill = by_path(prefill, order, reverse=True)
    segments = (*decode, *prefill)
    ids = [segment.seq.ids[-1] for segment in decode]
    first_rows = list(range(len(decode)))
    ends = np.array([segment.end for segment in decode], dtype=np.int64) - 1
    pages = np.array([s.seq.page_ids[(s.end - 1) // PAGE_SIZE] for s in decode], dtype=np.int64)
    start = np.array([segment.seq.position for segment in decode], dtype=np.int64)
    positions: list[npt.NDArray[np.int64]] = [start + ends]
    slots: list[npt.NDArray[np.int64]] = [pages * PAGE_SIZE + ends % PAGE_SIZE]
    logit_rows = list(range(len(decode)))
    for segment in prefill:
        seq = segment.seq
        first_rows.append(len(ids))
        ids.extend(seq.ids[segment.start : segment.end - len(segment.draft)])
        ids.extend(segment.draft)
        offsets = np.arange(segment.start, segment.end)
        positions.append(seq.position + offsets)
        held = np.array(
            seq.page_ids[segment.start // PAGE_SIZE : (segment.end - 1) // PAGE_SIZE + 1]
        )
        page = held[offsets // PAGE_SIZE - segment.start // PAGE_SIZE]
        slots.append(page * PAGE_SIZE + offsets % PAGE_SIZE)
        if segment.wants_logits:
            logit_rows.extend(range(len(ids) - 1 - len(segment.draft), len(ids)))
    return Batch(
        segments=segments,
        first_rows=tuple(first_rows),
        num_decode=len(decode),
        token_ids=torch.tensor(ids, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=torch.from_numpy(np.concatenate(slots)),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        logit_segments=(
            *decode,
            *(s for s in prefill if s.wants_logits for _ in range(1 + len(s.draft))),
        ),
    )


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device, where they arrive before any later kernel."""
    if device.type == "cpu":
        return batch

    def move(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True)

    return replace(
        batch,
        token_ids=move(batch.token_ids),
        positions=move(batch.positions),
        slots=move(batch.slots),
        logit_rows=move(batch.logit_rows),
    )

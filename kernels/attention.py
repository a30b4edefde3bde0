"""Attention parts over the paged cache and their exact merge (Hydragen, arXiv 2402.05099).

Every part returns `out` fp32 `[T, H, d]`, normalised within the part, and `lse` fp32 `[T, H]`, the
natural logarithm of its softmax denominator; an empty part has out = 0 and lse = -inf.
Caches are `[num_slots, num_kv_heads, head_dim]`, slot = page_id * PAGE_SIZE + offset. H is a
multiple of num_kv_heads; query head h reads KV head h // (H / num_kv_heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_SIZE = 64  # tokens

State = tuple[Tensor, Tensor]  # (out, lse) of one part


@dataclass(frozen=True, slots=True)
class Span:
    """Query rows [start, stop) and the keys they read: `length` tokens in runs of slots."""

    start: int
    stop: int
    length: int  # tokens
    runs: tuple[tuple[int, int], ...]  # (first slot, tokens); their tokens sum to length

    @classmethod
    def of_pages(cls, start: int, stop: int, pages: Sequence[int], length: int) -> Span:
        """Join adjacent pages into runs. ValueError: too few pages, or an empty row range."""
        if not 0 <= start < stop:
            raise ValueError(f"query rows [{start}, {stop}) are not a range")
        if length < 0 or length > len(pages) * PAGE_SIZE:
            raise ValueError(f"{length} tokens do not fit in {len(pages)} pages of {PAGE_SIZE}")
        runs: list[tuple[int, int]] = []
        left = length
        for page in pages[: -(-length // PAGE_SIZE)]:
            slot, size = int(page) * PAGE_SIZE, min(PAGE_SIZE, left)
            if runs and sum(runs[-1]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((slot, size))
            left -= size
        return cls(start, stop, length, tuple(runs))


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """One level of shared nodes of a step: which rows read which node. Built once per step.

    A deeper tree is one PrefixGroups (and one state) per level. `gaps` are the rows in no group.
    """

    num_rows: int
    spans: tuple[Span, ...]
    gaps: tuple[tuple[int, int], ...]

    @classmethod
    def build(
        cls, groups: Sequence[tuple[int, int, Sequence[int], int]], num_rows: int
    ) -> PrefixGroups:
        """From (row start, row stop, pages, length in tokens) per group, in ascending row order.

        pages: any sequence of ints. ValueError: overlapping or unordered groups, rows beyond
        num_rows, a length that the pages do not hold.
        """
        spans = tuple(Span.of_pages(*group) for group in groups)
        return cls(num_rows, spans, _gaps(spans, num_rows))


@dataclass(frozen=True, slots=True)
class PrefillMeta:
    """The sequences of a prefill step: rows and private keys of each. Built once per step."""

    num_rows: int
    spans: tuple[Span, ...]
    gaps: tuple[tuple[int, int], ...]

    @classmethod
    def build(
        cls, cu_q: Sequence[int], page_lists: Sequence[Sequence[int]], kv_lens: Sequence[int]
    ) -> PrefillMeta:
        """From cumulative row counts [S + 1], and per sequence its pages and its keys in tokens.

        kv_lens count the step's own rows, whose K/V are written before. A sequence without rows
        is left out. ValueError: kv_len below the sequence's rows, too few pages, lengths differ.
        """
        if not len(cu_q) - 1 == len(page_lists) == len(kv_lens):
            raise ValueError(
                f"{len(cu_q)} offsets, {len(page_lists)} page lists, {len(kv_lens)} lengths"
            )
        spans = []
        for start, stop, pages, kv_len in zip(cu_q, cu_q[1:], page_lists, kv_lens, strict=False):
            if kv_len < stop - start:
                raise ValueError(f"{kv_len} keys are fewer than the {stop - start} query rows")
            if stop > start:
                spans.append(Span.of_pages(start, stop, pages, kv_len))
        return cls(cu_q[-1], tuple(spans), _gaps(spans, cu_q[-1]))


def _gaps(spans: Sequence[Span], num_rows: int) -> tuple[tuple[int, int], ...]:
    gaps, row = [], 0
    for span in spans:
        if span.start < row:
            raise ValueError(f"rows [{span.start}, {span.stop}) overlap rows before {row}")
        if span.start > row:
            gaps.append((row, span.start))
        row = span.stop
    if row > num_rows:
        raise ValueError(f"row range ends at {row}, the step has {num_rows} rows")
    if row < num_rows:
        gaps.append((row, num_rows))
    return tuple(gaps)


def _gather(cache: Tensor, span: Span) -> Tensor:
    parts = [cache[slot : slot + size] for slot, size in span.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor, causal: bool
) -> None:
    rows, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    q3 = q.reshape(rows, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(q3.float(), k.float().permute(1, 2, 0)).view(kv_heads, rows, group, keys)
    scores.mul_(scale)
    if causal:
        last = keys - rows + torch.arange(rows)[:, None]
        hidden = torch.arange(keys)[None, :] > last
        scores.masked_fill_(hidden[None, :, None, :], float("-inf"))
    part = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - part[..., None]).view(kv_heads, rows * group, keys)
    result = torch.bmm(weights, v.float().transpose(0, 1)).view(kv_heads, rows, group, dim)
    out.copy_(result.permute(1, 0, 2, 3).reshape(rows, heads, dim))
    lse.copy_(part.permute(1, 0, 2).reshape(rows, heads))


def _run_spans(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: PrefixGroups | PrefillMeta,
    scale: float,
    out: Tensor,
    lse: Tensor,
    causal: bool,
) -> None:
    for start, stop in meta.gaps:
        out[start:stop] = 0
        lse[start:stop] = float("-inf")
    for span in meta.spans:
        rows = slice(span.start, span.stop)
        if span.length == 0:
            out[rows] = 0
            lse[rows] = float("-inf")
            continue
        k, v = _gather(k_cache, span), _gather(v_cache, span)
        _attend(q[rows], k, v, scale, out[rows], lse[rows], causal)


def prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    groups: PrefixGroups,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Each group's rows against all keys of its node, read once for the whole group; not causal.

    q [T, H, d]; out fp32 [T, H, d], written; lse fp32 [T, H], written.
    Rows in no group, or whose node is empty, get out = 0 and lse = -inf.
    """
    _run_spans(q, k_cache, v_cache, groups, scale, out, lse, causal=False)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: PrefillMeta,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Causal attention of each sequence's rows over its own pages.

    Row i of a sequence with q_len rows and kv_len keys sees keys j <= kv_len - q_len + i.
    q [T, H, d]; out fp32 [T, H, d], written; lse fp32 [T, H], written.
    """
    _run_spans(q, k_cache, v_cache, meta, scale, out, lse, causal=True)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One query row per sequence against the first seq_lens[b] tokens of its own pages.

    q [B, H, d]; page_table int32 [B, max_pages] (entries past a sequence's length are not read);
    seq_lens int32 [B], 0 allowed (out = 0, lse = -inf); out fp32 [B, H, d] and lse fp32 [B, H],
    written.
    """
    for row, length in enumerate(seq_lens.tolist()):
        span = Span.of_pages(row, row + 1, page_table[row].tolist(), length)
        if length == 0:
            out[row] = 0
            lse[row] = float("-inf")
            continue
        k, v = _gather(k_cache, span), _gather(v_cache, span)
        rows = slice(row, row + 1)
        _attend(q[rows], k, v, scale, out[rows], lse[rows], causal=False)


def merge_states(states: Sequence[State], result: Tensor) -> None:
    """The exact attention over all parts together, from each part's (out, lse).

    out fp32 [T, H, d], lse fp32 [T, H] per part, at least one; result [T, H, d] (or a view of
    [T, H * d]) in the model's dtype, written. All parts empty: 0.
    """
    lses = torch.stack([lse for _, lse in states])
    top = lses.amax(dim=0)
    weights = torch.exp(lses - torch.where(top == float("-inf"), 0.0, top))
    total = weights.sum(dim=0).clamp_min(1e-30)
    weights /= total
    merged = weights[0][..., None] * states[0][0]
    for (out, _), weight in zip(states[1:], weights[1:], strict=True):
        merged += weight[..., None] * out
    result.copy_(merged)

"""Obvious fp32 twins of every kernel: one formula each, no tiling; for tests and for reading.

Caches are `[num_slots, num_kv_heads, head_dim]`; slot = page_id * PAGE_SIZE + offset.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_SIZE = 64  # tokens


def slots_of(pages: Sequence[int], length: int) -> Tensor:
    """The slots of the first `length` tokens of a page list; int64 [length]."""
    offsets = torch.arange(length)
    return torch.tensor(list(pages), dtype=torch.int64)[offsets // PAGE_SIZE] * PAGE_SIZE + (
        offsets % PAGE_SIZE
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Full attention: q [T, H, d], k and v [n, KVH, d], visible bool [T, n]; fp32 (out, lse).

    lse is the natural logarithm, [T, H]; a row that sees no key has out = 0 and lse = -inf.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,nhd->thn", q.float(), keys) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.where(lse[..., None] == float("-inf"), 0.0, torch.exp(scores - lse[..., None]))
    return torch.einsum("thn,nhd->thd", weights, values), lse


def prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    groups: Sequence[tuple[int, int, Sequence[int], int]],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Rows [start, stop) of each (start, stop, pages, length) against all keys of that node."""
    out = torch.zeros(q.shape, dtype=torch.float32)
    lse = torch.full(q.shape[:2], float("-inf"))
    for start, stop, pages, length in groups:
        slots = slots_of(pages, length)
        out[start:stop], lse[start:stop] = attention(
            q[start:stop], k_cache[slots], v_cache[slots], scale
        )
    return out, lse


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Row b against the first seq_lens[b] tokens of the pages page_table[b]."""
    groups = [
        (row, row + 1, page_table[row].tolist(), int(seq_lens[row])) for row in range(q.shape[0])
    ]
    return prefix_attention(q, k_cache, v_cache, groups, scale)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sequences: Sequence[tuple[int, int, Sequence[int], int]],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal: row i of (start, stop, pages, kv_len) sees keys j <= kv_len - q_len + i."""
    out = torch.zeros(q.shape, dtype=torch.float32)
    lse = torch.full(q.shape[:2], float("-inf"))
    for start, stop, pages, kv_len in sequences:
        slots = slots_of(pages, kv_len)
        rows, keys = torch.arange(stop - start)[:, None], torch.arange(kv_len)[None, :]
        visible = keys <= kv_len - (stop - start) + rows
        out[start:stop], lse[start:stop] = attention(
            q[start:stop], k_cache[slots], v_cache[slots], scale, visible
        )
    return out, lse


def merge_states(states: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """sum_p exp(lse_p - m) out_p / sum_p exp(lse_p - m), m = max_p lse_p; all empty: 0."""
    lses = torch.stack([lse for _, lse in states]).double()
    outs = torch.stack([out for out, _ in states]).double()
    top = lses.amax(dim=0)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.exp(lses - top)
    total = weights.sum(dim=0)
    merged = (weights[..., None] * outs).sum(dim=0) / total.clamp_min(1e-300)[..., None]
    return merged.float()


def rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Half-split rotary embedding of x [T, heads, d], as transformers' rotate_half; fp32."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    cos = torch.cat([cos, cos], dim=-1)[:, None]
    sin = torch.cat([sin, sin], dim=-1)[:, None]
    low, high = x.float().chunk(2, dim=-1)
    return x.float() * cos + torch.cat([-high, low], dim=-1) * sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * cast(x / rms(x)): the normalised value is rounded to x's dtype first."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """cast(silu(gate)) * up of gate_up [T, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()).to(gate_up.dtype) * up

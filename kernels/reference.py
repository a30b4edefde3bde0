"""Obvious fp32 twins of every kernel: one formula each, no tiling; for tests and for reading.

Caches are `[num_slots, num_kv_heads, head_dim]`; slot = page_id * PAGE_SIZE + offset.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.spans import PAGE_SIZE, Spans


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


def span_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spans: Spans,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Rows of each span against its segments' keys, one after another; row r sees j <= base + r.

    The twin of prefix_attention, decode_attention and prefill_attention: out [P, T, H, d] and
    lse [P, T, H] fp32, written where spans are.
    """
    for (start, stop, base, state), segments in zip(
        spans.rows.tolist(), spans.segments.tolist(), strict=True
    ):
        slots = torch.cat([slots_of(spans.pages[at:].tolist(), tokens) for at, tokens in segments])
        rows, keys = torch.arange(start, stop)[:, None], torch.arange(len(slots))[None, :]
        out[state, start:stop], lse[state, start:stop] = attention(
            q[start:stop], k_cache[slots], v_cache[slots], scale, keys <= base + rows
        )


def merge_states(out: Tensor, lse: Tensor) -> Tensor:
    """sum_p exp(lse_p - m) out_p / sum_p exp(lse_p - m), m = max_p lse_p; all empty: 0.

    out [P, T, H, d], lse [P, T, H]; an empty state's out is not looked at.
    """
    lses = lse.double()
    outs = torch.where(lses[..., None] == float("-inf"), 0.0, out.double())
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


def quantised_linear(x: Tensor, weight: Tensor, planes: int = 1) -> Tensor:
    """x W^T with x rounded to 8 bits, 32 numbers to a scale; fp32.

    x [T, in]; weight [out, in]. With two planes what the rounding left is rounded likewise and
    added.
    """
    rest = x.float().view(len(x), -1, 32)
    rounded = torch.zeros_like(rest)
    for _ in range(planes):
        scale = rest.abs().amax(-1, keepdim=True) / 127
        plane = (rest / scale.clamp(min=1e-30)).round() * scale
        rounded, rest = rounded + plane, rest - plane
    return (rounded.flatten(1).double() @ weight.double().T).float()

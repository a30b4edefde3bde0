"""Compile, or load from the cache on disk, every CPU kernel before the first request."""

from __future__ import annotations

import time

import numpy as np
import torch

from kernels.attention import merge_states, prefill_attention
from kernels.elementwise import add_rms_norm, rms_norm, silu_mul
from kernels.kv import copy_kv, gather_kv, rope_table, stage_rows, write_kv
from kernels.quantised import warm_up as warm_up_quantised
from kernels.sampling import choose_tokens
from kernels.spans import PAGE_SIZE, Spans


def warm_up(dtype: torch.dtype, head_dim: int = 64) -> None:
    """Make all kernels ready for this dtype (fp32 or bf16) and head size.

    About 40 s when nothing is compiled yet, about a second from the cache on disk.
    """
    rows, heads = 2, 2
    q = torch.zeros(rows, heads, head_dim, dtype=dtype)
    k_cache, v_cache = (torch.zeros(PAGE_SIZE, heads, head_dim, dtype=dtype) for _ in range(2))
    slots = torch.arange(rows)
    table = rope_table(torch.ones(head_dim // 2), rows)
    write_kv(q, q, q, table, slots, slots, k_cache, v_cache)
    saved = torch.empty(rows, 2 * heads * head_dim, dtype=dtype)
    gather_kv(slots, k_cache, v_cache, saved)
    copy_kv(saved, slots, k_cache, v_cache)
    out, lse = torch.empty(1, rows, heads, head_dim), torch.empty(1, rows, heads)
    spans = Spans.build([(0, rows, [([0], rows)], True)])
    prefill_attention(q, k_cache, v_cache, spans, 1.0, out, lse)  # one kernel for all three
    merge_states(out, lse, q)
    wide = q.view(rows, heads * head_dim)
    stage_rows(wide[None], slots, slots, wide.clone(), rows)
    weight = torch.ones(heads * head_dim, dtype=dtype)
    add_rms_norm(rms_norm(wide, weight, 1e-5), wide, weight, 1e-5)
    silu_mul(wide)
    rule = np.array([[1.0, 0.9, 0.0, 0.5]])
    choose_tokens(wide[:1], np.zeros(1, np.int64), np.zeros(1, np.bool_), rule)


def main() -> None:
    """Compile for both dtypes: `python -m kernels.warm_up`, part of the set-up."""
    for dtype in (torch.bfloat16, torch.float32):
        began = time.perf_counter()
        warm_up(dtype)
        warm_up_quantised(dtype)
        took = time.perf_counter() - began
        print(f"kernels for {dtype} are ready after {took:.1f} s", flush=True)


if __name__ == "__main__":
    main()

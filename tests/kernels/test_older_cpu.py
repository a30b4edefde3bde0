"""The attention kernels on a CPU without AVX-512, as numba would compile them there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from kernels.attention import prefill_attention
from kernels.spans import Spans
from kernels.vector_ir import HAS_BF16_DOT
from kernels.warm_up import warm_up
assert not HAS_BF16_DOT
torch.manual_seed(0)
for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 8e-3)):
    warm_up(dtype)
    for rows, heads, kv_heads, dim in ((5, 6, 2, 64), (1, 6, 2, 64), (1, 3, 3, 80)):
        q = torch.randn(rows, heads, dim).to(dtype)
        k, v = (torch.randn(192, kv_heads, dim).to(dtype) for _ in range(2))
        k[131:], v[131:] = float("nan"), float("nan")
        wide = [t.float().repeat_interleave(heads // kv_heads, dim=1)[:131] for t in (k, v)]
        scores = torch.einsum("qhd,khd->hqk", q.float(), wide[0]) / 8
        for causal in (False, True):
            shape = (1, rows, heads)
            out, lse = torch.full((*shape, dim), float("nan")), torch.full(shape, float("nan"))
            if causal:
                hidden = torch.arange(131) > 131 - rows + torch.arange(rows)[:, None]
                scores = scores.masked_fill(hidden, -1e30)
            spans = Spans.build([(0, rows, [([0, 1, 2], 131)], causal)])
            prefill_attention(q, k, v, spans, 0.125, out, lse)
            expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide[1])
            assert (out[0] - expected).abs().max() < limit, (dtype, causal, rows, dim)
            assert (lse[0] - scores.logsumexp(-1).T).abs().max() < limit
"""


def test_attention_without_avx512(tmp_path: Path) -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    if "avx2" not in flags:
        pytest.skip("only x86-64 with AVX2 can compile for a Haswell")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, cwd=ROOT)

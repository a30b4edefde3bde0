"""Where the GPU check runs: on a CUDA device, or on the CPU in Triton's interpreter.

The interpreter shows that everything runs and that the results agree; its times mean nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.cuda_graphs import Capture, CudaCapture, replay_seconds
from kernels.spans import Spans
from kernels.triton_spans import AttentionShape, DeviceSpans

Call = Callable[[], None]
Row = dict[str, Any]  # of a table

CACHED_BYTES = 256 << 20  # more than four times the largest L2
INTERPRETED_PROGRAMS = 4


@dataclass(frozen=True)
class Lab:
    """A device, what runs on it, and its two roofs (1 before they are measured)."""

    device: torch.device
    dtype: torch.dtype
    bytes_per_s: float = 1.0
    flops_per_s: float = 1.0

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def programs(self) -> int | None:
        """As of `DeviceSpans`."""
        return None if self.is_cuda else INTERPRETED_PROGRAMS

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """Seconds that no implementation can go below."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def capture(self) -> Capture:
        """Captures steps; in the interpreter a step is the function itself."""
        return CudaCapture() if self.is_cuda else lambda run: run

    def free_bytes(self) -> int:
        """Of the device's memory; in the interpreter as much as tiny shapes may need."""
        if not self.is_cuda:
            return 256 << 20
        gc.collect()
        torch.cuda.empty_cache()  # what torch keeps of tensors that are gone
        return torch.cuda.mem_get_info(self.device)[0]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def seconds(self, calls: Sequence[Call]) -> float:
        """Median seconds of one of several equal calls, which differ in the memory they use."""
        if not self.is_cuda:
            began = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - began) / len(calls)
        return replay_seconds(calls)


def measure_roofs(lab: Lab) -> Lab:
    """The lab with its copy bandwidth (bytes read and written) and GEMM peak on random data."""
    size, width = (2 << 30, 8192) if lab.is_cuda else (1 << 20, 128)
    source = torch.empty(size, dtype=torch.uint8, device=lab.device).random_()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    a, b = lab.randn(width, width), lab.randn(width, width)
    c = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=c)

    return replace(
        lab,
        bytes_per_s=2.0 * size / lab.seconds([copy]),
        flops_per_s=2.0 * width**3 / lab.seconds([multiply] * 4),
    )


@contextmanager
def interpreted() -> Iterator[None]:
    """Engine and kernels take Triton's kernels for CPU tensors, which TRITON_INTERPRET=1 allows."""
    from kernels import triton_attention, triton_elementwise, triton_kv, triton_merge

    def attend(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        spans: Spans | DeviceSpans,
        scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        if isinstance(spans, Spans):
            shape = AttentionShape(q.shape[1], k_cache.shape[1], q.shape[2], q.dtype)
            spans = DeviceSpans.of(spans, shape, q.device, INTERPRETED_PROGRAMS)
        triton_attention.span_attention(q, k_cache, v_cache, spans, scale, out, lse)

    def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        triton_elementwise.norm(x, None, weight, eps, out)
        return out

    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        triton_elementwise.norm(x, residual, weight, eps, out)
        return out

    def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype)
        triton_elementwise.silu_mul(gate_up, out)
        return out

    merge = triton_merge.merge_states
    parts = {"decode_attention": attend, "prefix_attention": attend, "merge_states": merge}
    replaced: dict[str, dict[str, object]] = {
        "engine.model.decoder": {
            "rms_norm": rms_norm,
            "add_rms_norm": add_rms_norm,
            "silu_mul": silu_mul,
            "write_kv": triton_kv.write_kv,
        },
        "engine.model.attention": {**parts, "prefill_attention": attend},
        "engine.cuda_graphs": dict(parts),
        "engine.model.cuda_gate": dict(parts),
    }
    with ExitStack() as stack:
        for module, functions in replaced.items():
            for name, function in functions.items():
                stack.enter_context(patch(f"{module}.{name}", function))
        yield

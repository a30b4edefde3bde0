"""Compiles what the CUDA functions launch for an H100, on a machine that needs to have none.

A program of its own, since Triton either interprets or compiles in a process. It calls the
functions with CPU tensors; each launch ends when its kernel is compiled. Prints a JSON object for
each kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.spans import PAGE_SIZE, Spans
from kernels.triton_attention import span_attention
from kernels.triton_elementwise import norm, silu_mul
from kernels.triton_kv import copy_rows, write_kv
from kernels.triton_merge import merge_states
from kernels.triton_spans import AttentionShape, DeviceSpans

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class _H100:
    """The driver of a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _stack_bytes(cubin: bytes) -> int:
    """Of a thread: what does not fit in its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    assert found, text
    return int(found[1])


_run = JITFunction.run


def _compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    kernel = _run(self, *args, grid=grid, warmup=True, **kwargs)
    ptx = kernel.asm["ptx"]
    result = {
        "kernel": self.__name__,
        "block_rows": kwargs.get("BLOCK_M"),
        "dim": kwargs.get("DIM"),
        "dtype": next((str(x.dtype) for x in args if isinstance(x, Tensor)), None),
        "shared_bytes": kernel.metadata.shared,
        "stack_bytes": _stack_bytes(kernel.asm["cubin"]),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "copies": ptx.count("cp.async.cg.shared.global"),  # 16 bytes at a time
    }
    print(json.dumps(result), flush=True)


def _attend(shape: AttentionShape, rows: int) -> None:
    spans = Spans.build([(0, rows, [([1], 30)], False)])
    made = DeviceSpans.of(spans, shape, "cpu", 1)
    q = torch.zeros(rows, shape.heads + 2, shape.head_dim, dtype=shape.dtype)[:, : shape.heads]
    cache = torch.zeros(2 * PAGE_SIZE, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
    out, lse = torch.zeros(1, *q.shape), torch.zeros(1, *q.shape[:2])
    span_attention(q, cache, cache, made, 0.1, out, lse)


def _other_kernels() -> None:
    long = Spans.build([(0, 1, [(range(8), 500)], False)])
    shape = AttentionShape(8, 2, 128, torch.bfloat16)
    made = DeviceSpans.of(long, shape, "cpu", 8)
    q, cache = torch.zeros(1, 8, 128).bfloat16(), torch.zeros(512, 2, 128).bfloat16()
    out, lse = torch.zeros(3, 1, 8, 128), torch.zeros(3, 1, 8)
    span_attention(q, cache, cache, made, 0.1, out, lse)
    merge_states(out, lse, q)
    index = torch.zeros(1, dtype=torch.int64)
    write_kv(q, q[:, :2], q[:, 2:4], torch.zeros(9, 128), index, index, cache, cache)
    copy_rows(True, q.view(1, 1024)[:, :512], index, cache, cache)
    rows = q.view(1, 1024)
    norm(rows, rows, rows[0], 1e-5, rows)
    silu_mul(rows, rows[:, :512])


def main() -> None:
    driver.set_active(_H100())
    JITFunction.run = _compile_only
    bf16 = torch.bfloat16
    _attend(AttentionShape(32, 32, 128, bf16), 200)  # Llama-2-7B: prefix
    _attend(AttentionShape(32, 32, 128, bf16), 1)  # and decode
    _attend(AttentionShape(9, 3, 64, bf16), 200)
    _attend(AttentionShape(9, 3, 64, bf16), 10)
    _attend(AttentionShape(8, 4, 80, bf16), 20)
    _attend(AttentionShape(8, 4, 256, bf16), 200)
    _attend(AttentionShape(8, 4, 256, torch.float32), 1)
    _other_kernels()


if __name__ == "__main__":
    main()

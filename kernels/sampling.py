"""Tokens from logits on the CPU, each row by its own rule."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels import parallel, sampling_cpu

_scratch: NDArray[np.float64] = np.empty(0)  # grows, never shrinks; one thread calls


def choose_tokens(
    logits: Tensor, top_k: NDArray[np.int64], greedy: NDArray[np.bool_], rule: NDArray[np.float64]
) -> NDArray[np.int64]:
    """One token of each row, [rows]; -1 for a row to be sampled without a finite maximum.

    logits [rows, size], fp32 or bf16, row stride free, not written. greedy [rows]: the lowest id
    of the largest logit. Otherwise by inversion of the distribution function: of the weights
    exp(logit / temperature) at most top_k [rows] tokens (0: any number), then the fewest that hold
    top_p of their mass, then those of at least min_p of the best one's; the lower id first among
    equals. rule [rows, 4]: temperature above 0, top_p, min_p, and noise in [0, 1).
    """
    global _scratch
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"logits in {logits.dtype} are not supported: fp32 or bf16")
    rows, size = logits.shape
    if size % 16:
        logits = functional.pad(logits, (0, -size % 16), value=float("-inf"))
        size = logits.shape[1]
    elif logits.stride(1) != 1:
        logits = logits.contiguous()
    words = np.empty((rows, sampling_cpu.WORDS), np.int64)
    words[:, 0] = logits.data_ptr() + np.arange(rows) * (logits.stride(0) * logits.element_size())
    words[:, 1] = np.where((top_k > 0) & (top_k < size), top_k, 0)
    words[:, 2] = greedy
    rule = np.ascontiguousarray(rule, np.float64)
    tokens = np.empty(rows, np.int64)
    threads = parallel.num_threads()
    need = threads * sampling_cpu.scratch_bytes(size) // 8 + 1
    if len(_scratch) < need:
        _scratch = np.zeros(need)
    sampling_cpu.choose(
        logits.dtype == torch.bfloat16,
        words.ctypes.data,
        rule.ctypes.data,
        size,
        rows,
        tokens.ctypes.data,
        _scratch.ctypes.data,
        threads,
        sampling_cpu.PART.address,
    )
    return tokens

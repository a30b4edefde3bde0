"""The modules of compiled CPU kernels, for callers that also run where there is no numba.

An import statement inside a function costs as much as a small kernel; a cached call does not.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def row_kernels() -> tuple[ModuleType, ModuleType]:
    """`kernels.parallel` and `kernels.rows_cpu`."""
    from kernels import parallel, rows_cpu

    return parallel, rows_cpu


@cache
def attention_kernels() -> tuple[ModuleType, ModuleType, ModuleType, ModuleType]:
    """`kernels.attention_block_cpu`, `attention_cpu`, `attention_tile` and `parallel`."""
    from kernels import attention_block_cpu, attention_cpu, attention_tile, parallel

    return attention_block_cpu, attention_cpu, attention_tile, parallel

"""Runs a compiled function on the threads that torch's own kernels use.

A second pool beside torch's would spin against it (numba's `omp` layer loads a libgomp of its own,
its `workqueue` is 3x slower here), so kernels enter torch's OpenMP library directly: GOMP_parallel
calls worker(arguments) once on each of its threads. A worker's argument is
the address of an int64 array.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch
from numba import cfunc, types

from kernels import compile_cache as compile_cache  # before any function is compiled

_NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded; None where it has none with this interface."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("*omp*")):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


_library = _openmp()
if _library is not None:
    for _name in _NAMES:
        _function = ctypes.cast(getattr(_library, _name), ctypes.c_void_p)
        llvm.add_symbol(_name, _function.value)
else:  # one thread: never called, but compiled code names them
    for _name in _NAMES:
        llvm.add_symbol(_name, 1)

# void GOMP_parallel(void (*worker)(void *), void *arguments, unsigned threads, unsigned flags)
gomp_parallel: Any = types.ExternalFunction(
    "GOMP_parallel", types.void(types.int64, types.int64, types.uint32, types.uint32)
)
thread_number: Any = types.ExternalFunction("omp_get_thread_num", types.int32())
team_size: Any = types.ExternalFunction("omp_get_num_threads", types.int32())  # may be fewer


def num_threads() -> int:
    """Threads that a kernel may use: torch's, or 1 where its pool cannot be entered."""
    return torch.get_num_threads() if _library is not None else 1


class Worker:
    """A function, int64 -> None, that gomp_parallel can call; compiled when first needed."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Any = None

    @property
    def address(self) -> int:
        """The compiled function's address."""
        if self._compiled is None:
            signature = types.void(types.int64)
            self._compiled = cfunc(signature, cache=True, error_model="numpy")(self._function)
        address: int = self._compiled.address
        return address

"""The machine, and what it can do at most: memory bandwidth, GEMM peak, raw reads of its disk."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Row
from kernels.linear import PackedLinear

READ_REQUEST = 4 << 20  # bytes of one read, as the chunk store's largest
READ_THREADS = 2  # as the chunk store's readers


@dataclass(frozen=True)
class Peak:
    """Roofs of this run, for one dtype; taken between other people's work, if there is any."""

    bytes_per_s: float  # reads of memory that no cache holds
    flops_per_s: float  # packed GEMM in the dtype
    int8_flops_per_s: float  # packed GEMM of bytes, summed in 32 bits

    def better(self, other: Peak) -> Peak:
        """The higher roofs of two measurements of one run, either of which may be disturbed."""
        return Peak(
            max(self.bytes_per_s, other.bytes_per_s),
            max(self.flops_per_s, other.flops_per_s),
            max(self.int8_flops_per_s, other.int8_flops_per_s),
        )

    def floor_s(self, num_bytes: float, flops: float, int8_flops: float = 0.0) -> float:
        """Seconds that no implementation can go below."""
        compute = flops / self.flops_per_s + int8_flops / self.int8_flops_per_s
        return max(num_bytes / self.bytes_per_s, compute)

    def row(self) -> Row:
        """As it stands in a result."""
        return {
            "memory_gb_s": round(self.bytes_per_s / 1e9, 1),
            "gemm_gflop_s": round(self.flops_per_s / 1e9, 1),
            "int8_gemm_gop_s": round(self.int8_flops_per_s / 1e9, 1),
        }


def describe() -> Row:
    """What a reader needs to judge the figures by."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "numba", "numpy", "transformers", "openvino-genai"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),  # others' work, and our own start
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _best(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs: a roof is what the machine can do undisturbed."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return best


def measure_peak(dtype: torch.dtype, *, quick: bool) -> Peak:
    """Memory bandwidth and packed-GEMM peaks, with operands larger than the caches.

    Bandwidth: the sum of 256 MiB, all threads. GEMM: 512 rows, weights of 128 MiB in turn, by
    oneDNN, in the dtype and in bytes.
    """
    repeats = 4 if quick else 12
    buffer = torch.ones((64 if quick else 256) << 18)
    seconds = _best(buffer.sum, repeats)
    weight_bytes = (64 if quick else 128) << 20
    return Peak(
        buffer.nbytes / seconds,
        _gemm_flops_per_s(dtype, weight_bytes, repeats),
        _gemm_flops_per_s(torch.int8, weight_bytes, repeats),
    )


def _gemm_flops_per_s(dtype: torch.dtype, weight_bytes: int, repeats: int) -> float:
    inner, outer, rows = 2048, 4096, 512
    count = max(2, weight_bytes // (inner * outer * dtype.itemsize))
    make = _byte_product if dtype == torch.int8 else _product
    products = [make(rows, inner, outer, dtype) for _ in range(count)]
    turns = itertools.cycle(products)
    seconds = _best(lambda: next(turns)(), repeats * count + 1)
    return 2.0 * rows * inner * outer / seconds


def _product(rows: int, inner: int, outer: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    x, weight = (
        torch.randn(rows, inner).to(dtype),
        PackedLinear(torch.randn(outer, inner).to(dtype)),
    )
    return lambda: weight(x)


def _byte_product(rows: int, inner: int, outer: int, _: torch.dtype) -> Callable[[], Tensor]:
    """Unsigned bytes times signed ones, as the CPU's dot products take them."""
    x = torch.randint(0, 256, (rows, inner), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (outer, inner), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [rows, inner])
    scales, zeros = torch.full((outer,), 1e-3), torch.zeros(outer, dtype=torch.int64)

    def product() -> Tensor:
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return result

    return product


class RawDisk:
    """Plain reads of a file, as the store reads: two threads, 4 MiB requests. One thread calls it.

    `bytes_per_s` is the best pass so far: passes are spread over a run, so that others' disturbance
    of one of them does not lower what the disk is held to give. `direct` tells whether reads bypass
    the page cache (O_DIRECT); where that is refused, the file is dropped from it before each pass.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        """Write the file, to be read from now on. Raises OSError."""
        self.bytes_per_s = 0.0
        self._size = num_bytes // READ_REQUEST * READ_REQUEST
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            for _ in range(self._size // READ_REQUEST):
                file.write(os.urandom(READ_REQUEST))
            file.flush()
            os.fsync(file.fileno())
            self.direct = True
            try:
                self._fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                self.direct = False
                self._fd = os.open(file.name, os.O_RDONLY)

    def probe(self, passes: int) -> None:
        """Read the whole file this often."""
        for _ in range(passes):
            self.rate()

    def rate(self) -> float:
        """Bytes a second of one pass."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        rate = self._size / _read_all(self._fd, self._size)
        self.bytes_per_s = max(self.bytes_per_s, rate)
        return rate

    def close(self) -> None:
        """Let go of the file, which has no name any more."""
        os.close(self._fd)


def _read_all(fd: int, num_bytes: int) -> float:
    """Seconds that the threads take to read all requests of the file."""

    def read(first: int) -> None:
        with mmap.mmap(-1, READ_REQUEST) as memory, memoryview(memory) as view:
            for at in range(first, num_bytes // READ_REQUEST, READ_THREADS):
                os.preadv(fd, [view], at * READ_REQUEST)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(READ_THREADS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def drop_from_page_cache(directory: Path) -> None:
    """Make the next read of every file below `directory`, all of them synced, a cold one."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

"""Thread settings of a process that runs kernels; to be applied before torch is imported."""

from __future__ import annotations

import os


def configure_environment(num_threads: int = 0) -> None:
    """Set the environment that kernels want, keeping what the user has set; 0: one per core."""
    threads = num_threads or len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def configure_torch(num_threads: int = 0) -> None:
    """Set torch's pool to the same number of threads; 0: one per core."""
    import torch

    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))

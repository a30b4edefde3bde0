"""Settings of a process that runs kernels: threads, and what oneDNN keeps.

All kernels run on torch's OpenMP pool (see parallel.py). Measured on 2 cores, 120 packed linears of
8 rows alternating with 120 two-thread kernels, ms a step: 5.7 without the kernels; 5.8 with them on
torch's pool; 5.9 on numba's `omp` layer (a second pool, from a second libgomp); 16.2 on its
`workqueue`; 19.3 with OMP_WAIT_POLICY=passive, since waking a thread costs 40 us, finding it
spinning 2. So the pool must spin between the kernels of a step. GOMP_SPINCOUNT=20000, about 50 us,
costs nothing in that measurement (5.7), but it is too little beside a busy process: while one
thread is off its core the other falls asleep, and who sleeps gives up its claim to the next slice.
Steps of 32 chats beside a process that never rests, over steps alone: 7.7 at equal priority and 4.2
at nice 6 with 20,000; 3.7 and 1.5 with 400,000; no better with more. An idle engine spins 2.5 ms
longer.
"""

from __future__ import annotations

import os

_SPIN_COUNT = 1_000_000  # about 2.5 ms

# Kernels that oneDNN and its caller keep for shapes that they met, one for each number of rows and
# layer. With the 1,024 that they keep by themselves 1,500 steps of 1 to 320 rows took 900 MB of the
# embedded model's shapes, with 128 280 MB. One that is made anew costs a step 0.6 to 0.8 ms a layer
# shape (there are five), where the same number of rows was not met for some 25 others.
_KEPT_SHAPES = 128


def _threads(num_threads: int) -> int:
    return num_threads or len(os.sched_getaffinity(0))


def configure_environment(num_threads: int = 0) -> None:
    """Set the environment before torch is imported, keeping what the user has set.

    num_threads: 0 is one per core that this process may use.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(num_threads)))
    os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_SHAPES))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(_KEPT_SHAPES))  # of torch's side of oneDNN


def configure_torch(num_threads: int = 0) -> None:
    """Give torch, and so every kernel, that number of threads; 0 as above."""
    import torch

    torch.set_num_threads(_threads(num_threads))

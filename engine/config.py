"""Settings of the engine process, sent to it by the app at start."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.profile.record import DiskRead

CheckpointMethod = Literal["auto", "hidden", "kv", "recompute"]
CheckpointBits = Literal[16, 8, 6]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "fp32", "bf16"]
WeightChoice = Literal["auto", "fp32", "bf16", "int8", "int4"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the engine may be told; sizes in bytes, times in seconds."""

    model_dir: str
    model_name: str
    device: Device = "auto"
    dtype: DType = "auto"
    weights: WeightChoice = "auto"  # of projections and head; without a profile `auto` is the dtype
    kv_memory_bytes: int = 1 << 30  # 0: 1 GiB on a CPU, on CUDA what is free
    max_batch: int = 64  # sequences that decode in one step
    max_queue: int = 64  # requests that wait beyond those running
    max_context: int = 0  # 0: the model's own
    prefill_chunk: int = 512  # tokens of prefill in one step, all requests together
    idle_evict_s: float = 600.0  # a chat idle for longer gives its pages back
    share_prefix: Literal["auto", "always", "never"] = "auto"
    speculation: Literal["auto", "always", "never"] = "never"  # drafts by prompt lookup
    checkpoint_method: CheckpointMethod = "auto"
    checkpoint_bits: CheckpointBits = 16  # 16: as the model computes, exact
    checkpoint_dirs: tuple[str, ...] = ()  # empty: nothing is saved
    checkpoint_cap_bytes: int = 8 << 30
    staging_bytes: int = 256 << 20
    host_cache_bytes: int = 0  # of stripes kept in memory beside the disk; 0: none
    num_threads: int = 0  # 0: one per core
    profile_path: str = ""  # where measured figures are kept; empty: nothing is measured
    disk: DiskRead | None = None  # how fast checkpoints are read; None: it was not measured

"""Where the engine computes, and how much memory its K/V may take there."""

from __future__ import annotations

from math import prod

import torch

from engine.config import Device, DType, EngineConfig
from engine.memory.kv_cache import KVCache
from engine.model.geometry import ModelConfig, weight_shapes
from engine.profile.machine import dtype_name

CPU = torch.device("cpu")
CPU_KV_BYTES = 1 << 30
CUDA_SHARE = 0.9  # of what is free; the rest is for other processes and fragments
CUDA_SPARE_BYTES = 1 << 30  # for activations, captured steps and what the kernels keep


def resolve_device(name: Device) -> torch.device:
    """`auto` is CUDA where torch finds a device. Raises ValueError when `cuda` finds none."""
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ValueError("device is cuda, but torch finds no CUDA device; allowed: auto, cpu")
    return torch.device("cuda", torch.cuda.current_device()) if found and name != "cpu" else CPU


def resolve_dtype(name: DType, device: torch.device = CPU) -> torch.dtype:
    """`auto` is bf16 where the CPU or the GPU has instructions for it, else fp32."""
    if name == "auto" and device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if dtype_name(name) == "bf16" else torch.float32


def kv_memory_bytes(
    config: EngineConfig, geometry: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """What is set; or 1 GiB on a CPU, and on a GPU what is free beside the weights to come."""
    if config.kv_memory_bytes:
        return config.kv_memory_bytes
    if device.type == "cpu":
        return CPU_KV_BYTES
    weights = sum(map(prod, weight_shapes(geometry).values())) * dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(CUDA_SHARE * free) - weights - CUDA_SPARE_BYTES)


def page_count(
    config: EngineConfig, geometry: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Pages that the K/V memory holds."""
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    each = KVCache.bytes_per_page(geometry.num_layers, heads, head_dim, dtype)
    return kv_memory_bytes(config, geometry, dtype, device) // each

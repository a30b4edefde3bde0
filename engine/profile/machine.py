"""What a measured figure holds for: machine, disk, and the versions that ran. Torch-free."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

from engine.config import EngineConfig
from engine.model.geometry import ModelConfig

LAYOUT_VERSION = 2  # of what the figures mean; a change makes older ones be measured again
BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
CODE_PACKAGES = ("torch", "numba")


def cpu() -> str:
    """Model of the CPU, its cores that this process may use, and the machine's memory."""
    model = _cpu_field("model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{model}, {cores} cores, {round(memory / (1 << 30))} GiB"


def cpu_flags() -> frozenset[str]:
    """The instruction sets that the CPU says it has; empty where it says nothing."""
    return frozenset((_cpu_field("flags") or _cpu_field("Features")).split())


def dtype_name(wanted: str) -> str:
    """`fp32` or `bf16`: `auto` is bf16 where the CPU has instructions for it."""
    if wanted == "auto":
        return "bf16" if cpu_flags() & BF16_FLAGS else "fp32"
    return wanted


def disk_of(directory: Path) -> str:
    """The file system that a directory, or its closest parent that exists, lies on."""
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    device = place.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return name
    for line in reversed(lines):
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == name:
            kind, source = rest.split()[:2]
            return f"{name} {kind} {source}"
    return name


def disk_key(directory: Path) -> str:
    """What the disk's figures hold for."""
    return f"disk|{LAYOUT_VERSION}|{_machine()}|{disk_of(directory)}"


def compute_key(config: EngineConfig, geometry: ModelConfig) -> str:
    """What a layer's figures hold for: geometry and format of the weights, dtype, threads."""
    shape = (
        geometry.family.name,
        geometry.num_layers,
        geometry.hidden_size,
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.intermediate_size,
    )
    return f"compute|{_code(config)}|{geometry.dtype}|{shape}"


def attention_key(config: EngineConfig, geometry: ModelConfig) -> str:
    """What the attention's figures hold for."""
    shape = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)
    return f"attention|{_code(config)}|{shape}"


def _code(config: EngineConfig) -> str:
    versions = " ".join(f"{name} {version(name)}" for name in CODE_PACKAGES)
    threads = config.num_threads or len(os.sched_getaffinity(0))
    return f"{LAYOUT_VERSION}|{_machine()}|{versions}|{threads} threads|{dtype_name(config.dtype)}"


def _machine() -> str:
    flags = " ".join(sorted(cpu_flags()))
    return f"{cpu()}, flags {hashlib.blake2b(flags.encode(), digest_size=4).hexdigest()}"


def _cpu_field(name: str) -> str:
    """The first value of a field of /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        field, _, value = line.partition(":")
        if field.strip() == name:
            return value.strip()
    return ""

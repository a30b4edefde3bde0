"""What a measured figure holds for: machine, disk, and the versions that ran. Torch-free."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

from engine.config import EngineConfig
from engine.model.geometry import ModelConfig
from engine.model.weight_files import files_identity
from engine.profile.weight_figures import WeightFormat
from engine.restoration.coding import Coding

LAYOUT_VERSION = 2  # of what the figures mean; a change makes older ones be measured again
BYTE_PRODUCT_FLAG = "avx512_vnni"  # without it quantised products are slow
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


def format_without_figures(config: EngineConfig) -> WeightFormat | None:
    """The format of the weights where it needs no measuring; None where figures decide.

    `auto` is the dtype itself where fp32 is asked for, nothing may be measured, or the CPU lacks
    products of bytes. Raises ValueError for a plain format that is not the dtype.
    """
    dtype: WeightFormat = "bf16" if dtype_name(config.dtype) == "bf16" else "fp32"
    if config.weights in ("fp32", "bf16") and config.weights != dtype:
        raise ValueError(f"weights in {config.weights} do not go with the dtype {dtype}")
    if config.weights != "auto":
        return config.weights
    if config.dtype == "fp32" or not config.profile_path or BYTE_PRODUCT_FLAG not in cpu_flags():
        return dtype
    return None


def rotates(config: EngineConfig, geometry: ModelConfig) -> bool:
    """Whether the model runs in the rotated basis, for checkpoints of few bits."""
    if not config.checkpoint_dirs:
        return False
    coding = Coding(config.checkpoint_bits, dtype_name(config.dtype))
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    return coding.needs_rotation(config.checkpoint_method, geometry.hidden_size, heads, head_dim)


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
    """What a layer's figures hold for: geometry and format of the weights, dtype, threads.

    config.weights is the format that was chosen.
    """
    shape = (
        geometry.family.name,
        geometry.num_layers,
        geometry.hidden_size,
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.intermediate_size,
    )
    return f"compute|{_code(config)}|{geometry.dtype}|{config.weights}|{shape}"


def formats_key(config: EngineConfig, rotate: bool) -> str:
    """What the figures of a model's formats hold for. Raises ModelError when it has no weights."""
    model = files_identity(Path(config.model_dir))
    return f"formats|{_code(config)}|{model}|{'rotated' if rotate else 'as stored'}"


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

"""What `auto` plans from, as in a server: this machine's profile and its disk, measured anew."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from app.scratch_store import scratch_store
from benchmarks.report import Refused
from engine.config import EngineConfig
from engine.model.geometry import ModelConfig
from engine.profile.cache import ProfileCache
from engine.profile.choice import choose_format
from engine.profile.disk import DiskNotMeasured, measure_disk
from engine.profile.machine import compute_key
from engine.profile.record import ComputeCosts, DiskRead
from sessions.chunks import ChunkStoreError


@dataclass(frozen=True)
class Profile:
    """Figures of one run, for all its engines."""

    path: Path  # of the file that keeps what engines measure
    disk: DiskRead

    @classmethod
    def begin(cls, directory: Path) -> Profile:
        """Measure the disk; `directory` is the run's own. Raises Refused."""
        return cls(directory / "profile.json", measure_store(directory / "measured"))


def measure_store(directory: Path) -> DiskRead:
    """Cold reads through a chunk store below `directory`. Raises Refused."""
    try:
        return measure_disk(partial(scratch_store, directory))
    except (DiskNotMeasured, ChunkStoreError) as error:
        raise Refused(f"the disk could not be measured: {error}") from error


def throttled(disk: DiskRead, bytes_per_s: float | None) -> DiskRead:
    """The disk behind a ThrottledStore, which gives bytes evenly from the start; None: itself."""
    if bytes_per_s is None or bytes_per_s >= disk.bytes_per_s:
        return disk
    return DiskRead(bytes_per_s=bytes_per_s, first_s=0.0, first_bytes=0)


def settle(config: EngineConfig, geometry: ModelConfig) -> float:
    """Have every later engine of the run plan from the figures that the first one measured.

    However busy the machine was: the share of the measuring time that others left is returned.
    """
    cache = ProfileCache(Path(config.profile_path))
    weights = choose_format(config, geometry, rotate=False)  # by the figures of the first engine
    key = compute_key(msgspec.structs.replace(config, weights=weights), geometry)
    costs = cache.get(key, ComputeCosts)
    if costs is None:
        raise Refused(f"the measured profile could not be kept in {config.profile_path}")
    cache.put(key, msgspec.structs.replace(costs, undisturbed=1.0))
    return costs.undisturbed

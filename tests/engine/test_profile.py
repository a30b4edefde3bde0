"""Measured figures: kept with what they hold for, taken anew when that changes or they are lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch

from app.scratch_store import ScratchStore, scratch_store
from engine.config import EngineConfig
from engine.devices import resolve_dtype
from engine.model.model_config import read_model_config
from engine.model.weight_loading import load_weights
from engine.profile import choice, machine
from engine.profile.cache import ProfileCache
from engine.profile.compute import measure_compute
from engine.profile.disk import NUM_STRIPES, STRIPE_BYTES, DiskNotMeasured, disk_read, measure_disk
from engine.profile.record import ComputeCosts, DiskRead
from engine.restoration.coding import Coding
from engine.restoration.planner import Planner
from sessions.chunks import ChunkStore

FIGURE = DiskRead(bytes_per_s=5e8, first_s=0.01, first_bytes=1 << 22)
OTHER = msgspec.structs.replace(FIGURE, bytes_per_s=9e8)


def test_a_figure_is_measured_once(tmp_path: Path) -> None:
    taken: list[DiskRead] = []

    def measure() -> DiskRead:
        taken.append(FIGURE)
        return FIGURE

    for _ in range(3):
        cache = ProfileCache(tmp_path / "data" / "profile.json")
        assert cache.obtain("disk|1", DiskRead, measure) == FIGURE
    assert len(taken) == 1
    assert cache.obtain("disk|2", DiskRead, lambda: OTHER) == OTHER  # what it holds for changed
    assert cache.get("disk|1", DiskRead) == FIGURE
    assert cache.obtain("disk|1", DiskRead, lambda: OTHER, again=True) == OTHER
    assert ProfileCache(tmp_path / "data" / "profile.json").get("disk|1", DiskRead) == OTHER


@pytest.mark.parametrize("damage", [b"", b"{", b"\x00\xff", b'{"format":1,"figures":[]}'])
def test_a_damaged_file_is_measured_anew_with_one_line(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(damage)
    cache = ProfileCache(path)
    with caplog.at_level(logging.WARNING):
        assert cache.obtain("a", DiskRead, lambda: FIGURE) == FIGURE
    assert len(caplog.records) == 1
    assert "damaged" in caplog.text
    assert ProfileCache(path).get("a", DiskRead) == FIGURE


def test_a_damaged_figure_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    cache = ProfileCache(path)
    cache.put("a", FIGURE)
    cache.put("b", FIGURE)
    data = msgspec.json.decode(path.read_bytes())
    data["figures"]["a"] = {"bytes_per_s": "quick"}
    path.write_bytes(msgspec.json.encode(data))
    assert cache.get("a", DiskRead) is None
    assert cache.get("b", DiskRead) == FIGURE


def test_a_disk_that_takes_no_profile_costs_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cache = ProfileCache(tmp_path / "file" / "profile.json")
    assert cache.obtain("a", DiskRead, lambda: FIGURE) == FIGURE
    assert "cannot be kept" in caplog.text


COMPUTE = ComputeCosts(
    rows=(64, 256, 512),
    layer_s=(1.6e-3, 6e-3, 12e-3),
    hidden_s=(1.2e-4, 3.3e-4, 6e-4),
    kv_s=(4e-6, 1.6e-5, 3.2e-5),
    pair_s=2.5e-8,
    gemm_flops_per_s=400e9,
    pair_flops_per_s=100e9,
    copy_bytes_per_s=12e9,
)


def test_a_figure_taken_beside_busy_programs_is_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ProfileCache(tmp_path / "profile.json")
    at = [msgspec.structs.replace(COMPUTE, undisturbed=share) for share in (0.5, 0.3, 0.8, 1.0)]
    assert cache.obtain("c", ComputeCosts, lambda: at[0]).undisturbed == 0.5
    assert "took 50 % of the time" in caplog.text
    assert cache.obtain("c", ComputeCosts, lambda: at[1]).undisturbed == 0.5  # it was better
    assert cache.obtain("c", ComputeCosts, lambda: at[2]).undisturbed == 0.8
    assert cache.obtain("c", ComputeCosts, lambda: at[3]).undisturbed == 1.0
    assert cache.obtain("c", ComputeCosts, lambda: at[0]).undisturbed == 1.0


def test_keys_hold_for_machine_model_dtype_and_threads(tiny_model: Path) -> None:
    geometry = read_model_config(tiny_model)
    config = EngineConfig(model_dir=str(tiny_model), model_name="tiny", dtype="fp32")
    key = machine.compute_key(config, geometry)
    assert machine.cpu() in key
    assert torch.__version__.partition("+")[0] in key
    others = [
        machine.compute_key(msgspec.structs.replace(config, dtype="bf16"), geometry),
        machine.compute_key(msgspec.structs.replace(config, num_threads=7), geometry),
        machine.attention_key(config, geometry),
        machine.disk_key(tiny_model),
    ]
    assert len({key, *others}) == 5


def test_the_disk_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    assert machine.disk_of(tmp_path / "a" / "b") == machine.disk_of(tmp_path)
    assert machine.disk_of(tmp_path) != machine.disk_of(Path("/proc"))


def test_measuring_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    (parent / "measuring-left").mkdir(parents=True)
    disk = measure_disk(partial(scratch_store, parent))
    assert disk.bytes_per_s > 1e6
    assert 0 < disk.first_s < 10
    assert STRIPE_BYTES <= disk.first_bytes <= NUM_STRIPES * STRIPE_BYTES
    assert 0 <= disk.latency_s <= disk.first_s
    assert list(parent.iterdir()) == []


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    @contextlib.contextmanager
    def full() -> Iterator[ScratchStore]:
        store = ChunkStore([tmp_path], cap_bytes=4 << 20)
        yield ScratchStore(store, tmp_path)
        store.close()

    with pytest.raises(DiskNotMeasured, match="could not be written"):
        measure_disk(full)
    (tmp_path / "file").touch()
    with pytest.raises(DiskNotMeasured, match="File exists"):
        measure_disk(partial(scratch_store, tmp_path / "file"))


def test_a_read_that_comes_back_damaged_is_told(tmp_path: Path) -> None:
    class Damaging(ScratchStore):
        def make_cold(self) -> None:
            path = max(self.directory.iterdir(), key=lambda each: each.stat().st_size)
            with path.open("r+b") as file:
                file.seek(STRIPE_BYTES // 2)
                file.write(b"not what was written")

    @contextlib.contextmanager
    def damaging() -> Iterator[ScratchStore]:
        with scratch_store(tmp_path) as place:
            yield Damaging(place.store, place.directory)

    with pytest.raises(DiskNotMeasured, match="checksum"):
        measure_disk(damaging)


def test_the_disk_is_measured_at_the_first_start_only(tmp_path: Path) -> None:
    config = EngineConfig(model_dir="", model_name="", profile_path=str(tmp_path / "profile.json"))
    first = disk_read(config, tmp_path, partial(scratch_store, tmp_path / "c"))

    def never() -> contextlib.AbstractContextManager[ScratchStore]:
        raise AssertionError("measured twice")

    assert disk_read(config, tmp_path, never) == first


def test_measuring_a_model(tiny_model: Path) -> None:
    """Every figure is there, and no row is dearer among more."""
    weights = load_weights(tiny_model, read_model_config(tiny_model), torch.float32, 4096)
    costs = measure_compute(weights, budget_s=0.3)
    for seconds in (costs.layer_s, costs.hidden_s):
        a_row = [each / count for each, count in zip(seconds, costs.rows, strict=True)]
        assert all(0 < more <= 1.101 * fewer for fewer, more in pairwise(a_row))
    assert costs.kv_s[0] < costs.kv_s[-1]
    for name in ("gemm_flops_per_s", "pair_flops_per_s", "copy_bytes_per_s", "pair_s"):
        assert 0 < getattr(costs, name) < 1e14
    assert costs.code_s.keys() == {"hidden8", "hidden6", "kv8"}
    assert all(each > 0 for each in costs.code_s.values())
    assert costs.hidden(512) > 0
    assert costs.layer(512, 100) > costs.layer(512, 0)
    assert 0 < costs.undisturbed <= 1.05


def test_what_an_engine_chooses_by(tiny_model: Path, tmp_path: Path) -> None:
    """Without a place for figures nothing is measured; with one, `auto` is the planner's."""
    config = EngineConfig(model_dir=str(tiny_model), model_name="tiny", dtype="fp32", disk=FIGURE)
    geometry = read_model_config(tiny_model)
    weights = load_weights(tiny_model, geometry, resolve_dtype("fp32"), 4096)
    plain = Coding(16, "fp32")
    assert choice.make_plans(config, weights, plain).plan(0, 100).name == "hidden"  # the smaller
    path = tmp_path / "profile.json"
    kept = msgspec.structs.replace(config, profile_path=str(path))
    ProfileCache(path).put(machine.compute_key(kept, geometry), COMPUTE)
    plans = choice.make_plans(kept, weights, plain)
    assert isinstance(plans, Planner)
    assert plans.compute == COMPUTE
    forced = msgspec.structs.replace(kept, checkpoint_method="kv")
    assert choice.make_plans(forced, weights, plain).plan(0, 100).name == "kv"

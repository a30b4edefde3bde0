"""The composition of the engine process."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

import app.engine_process
from app.engine_process import open_store, with_measured_disk
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.profile.disk import DiskNotMeasured
from engine.profile.record import DiskRead
from sessions.chunks import ChunkStore, StoreLockedError


def config(*directories: Path, model_dir: str = "") -> EngineConfig:
    return EngineConfig(
        model_dir=model_dir,
        model_name="",
        checkpoint_dirs=tuple(map(str, directories)),
        checkpoint_cap_bytes=1 << 20,
    )


def test_nothing_is_stored_without_a_directory() -> None:
    assert open_store(config()) is None


def test_the_last_flush_of_a_killed_apps_engine_is_waited_for(tmp_path: Path) -> None:
    orphans = ChunkStore([tmp_path], 1 << 20)
    threading.Timer(0.3, orphans.close).start()
    store = open_store(config(tmp_path))
    assert store is not None
    assert store.bytes_cap == 1 << 20
    store.close()


def test_the_store_of_another_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.engine_process, "ORPHAN_LIMIT_S", 0.1)
    others = ChunkStore([tmp_path], 1 << 20)
    with pytest.raises(StoreLockedError):
        open_store(config(tmp_path))
    others.close()


@pytest.mark.anyio
async def test_a_missing_model_is_the_reason_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    missing = tmp_path / "no-such-model"
    with pytest.raises(ModelError, match="no-such-model"):
        await EngineClient.start(config(tmp_path / "chunks", model_dir=str(missing)))
    # The engine's end closed the store: it can be opened at once.
    ChunkStore([tmp_path / "chunks"], 1 << 20).close()


def test_of_several_disks_the_slowest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A chat lies on one of them, and its plan is chosen before it is known on which."""
    rates = {"quick": 3e9, "slow": 1e8, "middling": 1e9}

    def measured(config: EngineConfig, directory: Path, scratch: object) -> DiskRead:
        if directory.name == "broken":
            raise DiskNotMeasured("it took nothing")
        return DiskRead(bytes_per_s=rates[directory.name], first_s=0.0, first_bytes=1)

    monkeypatch.setattr(app.engine_process, "disk_read", measured)
    asked = msgspec.structs.replace(
        config(*(tmp_path / name for name in ("quick", "slow", "broken", "middling"))),
        profile_path=str(tmp_path / "profile.json"),
    )
    disk = with_measured_disk(asked).disk
    assert disk is not None
    assert disk.bytes_per_s == 1e8
    assert "broken could not be measured" in caplog.text
    only_broken = msgspec.structs.replace(asked, checkpoint_dirs=(str(tmp_path / "broken"),))
    assert with_measured_disk(only_broken).disk is None

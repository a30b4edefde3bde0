"""The plan on the operator's page, and the time to read a prefix, over a kept profile."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from app.assistants.costs import Costs
from app.operating.plan import plan_report
from app.settings import Settings, load_settings
from engine.model.model_config import read_model_config
from engine.profile import machine
from engine.profile.cache import ProfileCache
from sessions.repository import Repository
from tests.app.fake_engine import FakeEngine
from tests.setup.test_planning import ATTENTION, COMPUTE, DISK


@pytest.fixture
def settings(tmp_path: Path, embedded_model: Path) -> Settings:
    options = {"data_dir": str(tmp_path), "model": str(embedded_model)}
    return load_settings({**options, "dtype": "bf16", "weights": "bf16"})


def keep_profile(settings: Settings, model_dir: Path) -> None:
    config = settings.engine_config(model_dir)
    assert config.weights == "bf16", "a format that needs no figures"
    geometry = read_model_config(model_dir)
    cache = ProfileCache(settings.profile_path)
    cache.put(machine.compute_key(config, geometry), COMPUTE)
    cache.put(machine.attention_key(config, geometry), ATTENTION)
    cache.put(machine.disk_key(Path(config.checkpoint_dirs[0])), DISK)


def test_the_chosen_plan_stands_beside_the_pure_ones(
    settings: Settings, embedded_model: Path
) -> None:
    assert plan_report(settings) is None, "nothing is measured for a page"
    keep_profile(settings, embedded_model)
    report = plan_report(settings)
    assert report is not None
    assert report.head[1:3] == ["layers", "predicted"]
    assert [row[0] for row in report.rows] == ["chosen", "hidden", "kv", "recompute"]
    assert {len(row) for row in report.rows} == {len(report.head)}
    kv = dict(zip(report.head, report.rows[2], strict=True))
    assert (kv["layers"], kv["bytes/token"], kv["total"]) == ("kv", "23040", "45.0 MiB")
    assert report.reason.startswith("chosen: ")
    assert "2048 tokens of a chat" in report.subject[1]


@pytest.mark.anyio
async def test_reading_takes_what_the_profile_says(
    settings: Settings, embedded_model: Path
) -> None:
    keep_profile(settings, embedded_model)
    costs = Costs(
        settings=settings,
        engine=FakeEngine(),
        repository=cast(Repository, None),  # asked only where there is no profile
    )
    cost = await costs.of(1024)
    layers = read_model_config(embedded_model).num_layers
    expected = layers * (2 * 12e-3 + 2.5e-8 * 512 * 512)
    assert cost.reading is not None
    assert cost.reading.seconds == pytest.approx(expected)
    assert "profile" in cost.reading.source

"""`rejoinder profile` and `rejoinder plan`, over a profile that is there already."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import main
from app.settings import Settings, load_settings
from engine.model.model_config import read_model_config
from engine.profile import machine
from engine.profile.cache import ProfileCache
from engine.profile.record import AttentionCosts, ComputeCosts, DiskRead

COMPUTE = ComputeCosts(
    rows=(64, 256, 512),
    layer_s=(1.6e-3, 6e-3, 12e-3),
    hidden_s=(1.2e-4, 3.3e-4, 6e-4),
    kv_s=(4e-6, 1.6e-5, 3.2e-5),
    pair_s=2.5e-8,
    gemm_flops_per_s=400e9,
    pair_flops_per_s=100e9,
    copy_bytes_per_s=12e9,
    code_s={"hidden8": 0.25e-9, "hidden6": 0.6e-9, "kv8": 0.4e-9},
)
ATTENTION = AttentionCosts(
    rows=(2, 32),
    tokens=(64, 4096),
    shared_s=((2e-5, 3e-4), (1e-4, 1e-3)),
    own_s=((1e-5, 6e-4),) * 2,
)
DISK = DiskRead(bytes_per_s=1.5e9, first_s=0.003, first_bytes=3 << 20)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def given(tmp_path: Path, embedded_model: Path) -> list[str]:
    """Options of a data directory whose profile is kept."""
    options = {"data_dir": str(tmp_path), "model": str(embedded_model), "dtype": "bf16"}
    options["weights"] = "bf16"  # nothing to be measured before it is chosen
    settings: Settings = load_settings(options)
    config = settings.engine_config(embedded_model)
    geometry = read_model_config(embedded_model)
    cache = ProfileCache(settings.profile_path)
    cache.put(machine.compute_key(config, geometry), COMPUTE)
    cache.put(machine.attention_key(config, geometry), ATTENTION)
    cache.put(machine.disk_key(Path(config.checkpoint_dirs[0])), DISK)
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def test_the_profile_is_shown(given: list[str]) -> None:
    result = run("profile", *given)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "30 layers, width 576, K/V width 192 (hidden states are 1.50x K/V), bf16" in text
    assert "1500 MB/s" in text
    assert "400 GFLOP/s" in text
    layer = next(line for line in text.splitlines() if line.startswith("run again "))
    assert layer.split()[2:] == ["1.60", "6.00", "12.00", "30.55", "87.32"]


def test_the_plan_stands_beside_the_pure_ones(given: list[str]) -> None:
    result = run("plan", *given, "--tokens=2048", "--disk-mbps=125")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    table = {line.split()[0]: line for line in lines[3:8] if line.strip()}
    assert {"chosen", "hidden", "kv", "recompute"} <= set(table)
    assert "23040" in table["kv"]  # 30 layers x 2 x 192 x 2 bytes
    assert "45.0 MiB" in table["kv"]
    assert "recompute" in table["chosen"]
    rows = {name: line for name, line in table.items() if name != "layers"}
    times = {name: float(line.split(" ms")[0].split()[-1]) for name, line in rows.items()}
    assert times["chosen"] == min(times.values())
    assert times["kv"] == pytest.approx(2048 * 23040 / 125e6 * 1e3, rel=0.01)
    assert "limited by" in lines[-1]
    assert "given" in lines[1]


def test_a_geometry_without_weights_says_that_it_is_scaled(given: list[str]) -> None:
    result = run("plan", *given, "--geometry=llama-2-7b", "--tokens=1000", "--prefix=500")
    assert result.exit_code == 0, result.output
    assert "32 layers, width 4096, K/V width 4096 (hidden states are 0.50x K/V)" in result.stdout
    assert "scaled from this machine's 400 GFLOP/s, not measured" in result.stdout
    assert "1000 tokens of a chat behind 500 shared ones" in result.stdout
    assert "1500 MB/s, as measured" in result.stdout


def test_the_smallest_within_a_time(given: list[str]) -> None:
    quick = run("plan", *given, "--disk-mbps=125")
    small = run("plan", *given, "--disk-mbps=125", "--ttft-ms=3000")
    assert "the smallest with the first token within 3000 ms" in small.stdout

    def size(result: Result) -> int:
        line = next(x for x in result.stdout.splitlines() if x.startswith("chosen "))
        return int(line.split()[-3])

    assert size(small) < size(quick)
    none = run("plan", *given, "--disk-mbps=125", "--ttft-ms=1")
    assert "no plan gives the first token within 1 ms" in none.stdout


def test_without_a_measured_disk_its_speed_is_asked_for(given: list[str]) -> None:
    result = run("plan", *given, "--checkpoint-cap-mib=0")
    assert result.exit_code == 1
    assert "give --disk-mbps" in result.output
    assert run("plan", *given, "--checkpoint-cap-mib=0", "--disk-mbps=500").exit_code == 0


def test_a_missing_model_is_said(tmp_path: Path) -> None:
    result = run("plan", "--data-dir", str(tmp_path), "--model", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "there is no model" in result.output


@pytest.mark.slow
def test_measuring_in_a_process_of_its_own(tmp_path: Path, embedded_model: Path) -> None:
    options = [f"--data-dir={tmp_path}", f"--model={embedded_model}"]
    result = run("profile", *options)
    assert result.exit_code == 0, result.output
    assert "measuring layers and projections" in result.stderr
    assert "MB/s cold" in result.stdout
    again = run("profile", *options)
    assert "measuring" not in again.stderr


def test_plans_of_coded_checkpoints(given: list[str]) -> None:
    """The same question in 16 and 8 bits: about half the bytes, and half the reads."""
    ask = ("plan", *given, "--disk-mbps=125", "--tokens=2600")
    exact, coded = run(*ask), run(*ask, "--checkpoint-bits=8")
    assert "stored in 8 bits" in coded.stdout
    assert "stored in" not in exact.stdout
    each = {
        name: [int(line.split()[-3]) for line in text.splitlines() if line.startswith("kv ")]
        for name, text in (("exact", exact.stdout), ("coded", coded.stdout))
    }
    assert each == {"exact": [30 * 768], "coded": [30 * 2 * 3 * 66]}

"""The GPU check runs to its end where there is no GPU, and without the packages of the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_host
from benchmarks.gpu_attention import Differ
from benchmarks.gpu_cells import SMALL, check, losses
from benchmarks.gpu_check import Check, table, write
from benchmarks.gpu_decode import Steps, fitting_layers, make_weights
from benchmarks.gpu_lab import Lab, interpreted

ROOT = Path(__file__).parents[2]
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
# Importing one of these fails, in the check and in the pytest that it starts.
BLOCKER = """
import sys

MISSING = {
    "aiosqlite", "alembic", "annotated_types", "click", "crc32c", "gguf", "httpx2", "hypothesis",
    "huggingface_hub", "litestar", "llvmlite", "markdown_it", "msgspec", "nh3", "numba",
    "pydantic", "pydantic_settings", "safetensors", "sqlalchemy", "tokenizers", "transformers",
    "uvicorn",
}


class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_all_of_it_runs_on_tiny_sizes_with_torch_triton_numpy_and_pytest_alone(
    tmp_path: Path,
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    out = tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--interpret", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    assert result["failed"] == []
    assert "tests collected" in result["tests"]
    assert not result["tests"].startswith("0")
    assert {row["kernel"] for row in result["attention"]} == {
        "prefix",
        "suffix",
        "prefill",
        "merge",
    }
    assert [row["tokens"] for row in result["sharing"]] == [64]
    sizes = [(row["prefix"], row["batch"]) for row in result["decode"]]
    assert sizes == list(SMALL.cells)
    assert all(row["flash_kv"] == "all layers" for row in result["decode"])
    assert any("logits of all sides agree" in note for note in result["notes"])
    (loss,) = result["losses"]
    assert (loss["from"], loss["to"]) == (64, 130)
    assert "losses" in run.stdout.splitlines()
    assert run.stdout.rstrip().endswith(f"written to {out}")


@pytest.mark.skipif(not INTERPRETS, reason="needs Triton's interpreter")
def test_sides_that_disagree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that forgets the shared nodes is noticed."""
    lab = Lab(torch.device("cpu"), torch.float32)
    _, config = SMALL.models[0]
    assert fitting_layers(lab, config, 70, 3) == config.num_layers

    def first_state(out: Tensor, lse: Tensor, result: Tensor) -> None:
        result.copy_(out[0].view(result.shape))

    with interpreted():
        steps = Steps(lab, make_weights(lab, config), 70, 3)
        monkeypatch.setattr("engine.cuda_graphs.merge_states", first_state)
        with pytest.raises(Differ, match="logits of shared decoding by a graph differ"):
            check(steps, 70, 2)


def test_a_section_that_fails_or_is_too_late_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    run = Check(1000.0, True)

    def fails() -> None:
        raise RuntimeError("broken")

    run.section("one", fails)
    run.section("two", lambda: ran.append("two"))
    late = Check(0.0, True)
    late.section("three", lambda: ran.append("three"))
    assert ran == ["two"]
    assert run.failed == ["one: RuntimeError: broken"]
    assert late.result["notes"] == ["three: skipped, no time is left"]
    assert "broken" in capsys.readouterr().err


def test_tests_that_fail_or_hang_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(body: str) -> None:
        monkeypatch.setattr(
            gpu_host, "pytest_command", lambda *, collect_only: [sys.executable, "-c", body]
        )

    command("print('3 passed')")
    assert gpu_host.run_tests(60, collect_only=False) == "3 passed"
    command("print('1 failed'); exit(1)")
    with pytest.raises(RuntimeError, match="status 1: 1 failed"):
        gpu_host.run_tests(60, collect_only=False)
    command("import time; print('begun', flush=True); time.sleep(60)")
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match="did not end within 1 s"):
        gpu_host.run_tests(1, collect_only=False)
    assert time.perf_counter() - began < 30


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu_check import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2


def test_the_loss_is_from_the_shortest_to_the_longest_prefix(tmp_path: Path) -> None:
    rows = [
        {"model": "m", "batch": 8, "prefix": p, "shared_tok_s": s, "unshared_tok_s": u,
         "flash_tok_s": f}
        for p, s, u, f in ((16384, 90.0, 10.0, None), (1024, 100.0, 40.0, 50.0), (4096, 1, 1, 1))
    ]  # fmt: skip
    (loss,) = losses(rows)
    assert loss == {
        "model": "m",
        "batch": 8,
        "from": 1024,
        "to": 16384,
        "shared_loss": 0.1,
        "unshared_loss": 0.75,
        "flash_loss": None,
    }
    assert table([loss]).splitlines()[1].split() == ["m", "8", "1024", "16384", "0.1", "0.75"]
    named = write({"date": "2026-01-02 03:04 UTC", "card": "NVIDIA H200"}, tmp_path / "results")
    assert named == tmp_path / "results" / "gpu-nvidia-h200-2026-01-02.json"
    assert json.loads(named.read_text())["card"] == "NVIDIA H200"

"""A tiny random model, and benchmarks run as from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import make_tiny_model

Benchmark = Callable[[Sequence[str]], int]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("benchmarks") / "tiny", num_kv_heads=2)


@pytest.fixture
def quick(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any] | None, str]]:
    """Run `main` with --quick --json, and more options: exit status, the last line's object,
    standard error."""

    def run(main: Benchmark, *more: str) -> tuple[int, dict[str, Any] | None, str]:
        status = main(["--quick", "--json", "--model", str(tiny_model), "--dtype", "fp32", *more])
        captured = capsys.readouterr()
        lines = captured.out.splitlines()
        return status, json.loads(lines[-1]) if lines else None, captured.err

    return run

"""What the GPU check asks of the machine around the card: versions, and pytest."""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEST_FILES = ("tests/kernels/test_*.py", "tests/engine/test_cuda_*.py")
GPU_TESTS = ("mark.gpu", "tests.kernels.triton_cases")  # what a file with `gpu` tests names
MAX_WORKERS = 8


def versions() -> dict[str, Any]:
    """Date, versions, and the card if there is one."""
    import torch
    import triton

    found: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "card": card.name,
            "memory_gib": round(card.total_memory / (1 << 30), 1),
            "multiprocessors": card.multi_processor_count,
            "capability": f"{card.major}.{card.minor}",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return found


def _output(*command: str) -> str:
    """What a command prints; empty where it cannot run."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip()


def pytest_command(*, collect_only: bool) -> list[str]:
    """pytest on the files with `gpu` tests, on several processes where pytest-xdist is there.

    Our configuration and fixtures are left out: they need packages that a GPU machine may lack.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-c", os.devnull]
    command += ["--rootdir", str(ROOT), "--import-mode=importlib", "--noconftest", "--no-header"]
    command += ["-p", "no:cacheprovider", "-p", "tests.kernels.conftest", "--tb=short"]
    command += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    if collect_only:
        command.append("--collect-only")
    elif importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(MAX_WORKERS, os.cpu_count() or 1))]
    paths = sorted(
        path
        for pattern in TEST_FILES
        for path in ROOT.glob(pattern)
        if any(name in path.read_text() for name in GPU_TESTS)
    )
    return command + [str(path.relative_to(ROOT)) for path in paths]


def run_tests(limit_s: float, *, collect_only: bool) -> str:
    """Run the `gpu` tests; pytest's last line.

    Raises RuntimeError when one fails, after showing the output, and TimeoutError.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen(
        pytest_command(collect_only=collect_only),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # pytest-xdist's workers are ended with it
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(output[-8000:])
        raise TimeoutError(f"the tests did not end within {limit_s:.0f} s") from None
    summary = output.strip().splitlines()[-1] if output.strip() else "no output"
    if process.returncode:
        print(output[-8000:])
        raise RuntimeError(f"pytest ended with status {process.returncode}: {summary}")
    return summary

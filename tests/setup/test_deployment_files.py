"""The systemd unit and the container file agree with the program that they start."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import app.drain
import app.server
from app.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
UNIT = (DOCS / "rejoinder.service").read_text()
CONTAINER = (DOCS / "Containerfile").read_text()
ENGINE_FLUSH_S = 15.0  # default of EngineClient.close


def option(name: str) -> str:
    [value] = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_the_unit_gives_the_drain_its_time() -> None:
    drain_s = float(re.findall(r"^Environment=REJOINDER_DRAIN_S=(\d+)$", UNIT, re.MULTILINE)[0])
    needed_s = drain_s + app.drain.STORED_S + app.server.GRACEFUL_SHUTDOWN_S + ENGINE_FLUSH_S
    assert float(option("TimeoutStopSec")) > needed_s
    assert option("KillSignal") == "SIGTERM"
    assert option("KillMode") == "mixed", "the engine is told by the server"
    assert option("Restart") == "on-failure"


def test_the_container_gives_the_drain_its_time() -> None:
    needed_s = Settings().drain_s + app.drain.STORED_S + app.server.GRACEFUL_SHUTDOWN_S
    [stop_s] = re.findall(r"--stop-timeout (\d+)", CONTAINER)
    assert float(stop_s) > needed_s + ENGINE_FLUSH_S
    assert "STOPSIGNAL SIGTERM" in CONTAINER


def test_all_that_is_set_is_a_setting() -> None:
    named = set(re.findall(r"REJOINDER_([A-Z_]+)", UNIT + CONTAINER))
    assert {name.lower() for name in named} <= set(Settings.model_fields)


def test_what_is_written_lies_where_it_may_be_written() -> None:
    written = dict(re.findall(r"^Environment=(\w+)=(/\S+)$", UNIT, re.MULTILINE))
    state = f"/var/lib/{option('StateDirectory')}"
    assert written["REJOINDER_DATA_DIR"] == state
    assert written["NUMBA_CACHE_DIR"].startswith(f"{state}/")
    assert not re.search(r"^MemoryDenyWriteExecute=", UNIT, re.MULTILINE), "kernels are compiled"
    assert re.search(r"NUMBA_CACHE_DIR=/data/", CONTAINER)
    assert re.search(r"REJOINDER_DATA_DIR=/data\b", CONTAINER)
    assert "USER rejoinder" in CONTAINER


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_knows_every_line_of_the_unit() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(DOCS / "rejoinder.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "rejoinder.service" in line]
    assert [line for line in complaints if "is not executable" not in line] == []

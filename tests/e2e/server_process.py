"""Starts a server as a process and waits until it says where it serves."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
PROFILE_NAME = "profile.json"
SERVES = re.compile(r"Rejoinder serves on (http://\S+)")
# What a server measures of machine and model at its first start, from one test to the next; of
# one run of the tests, whatever worker they are on.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
PROFILE = Path(tempfile.gettempdir()) / f"rejoinder-tests-{RUN}.profile.json"


def lend_profile(data_dir: Path) -> None:
    """Give a data directory what earlier servers measured."""
    if PROFILE.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PROFILE, data_dir / PROFILE_NAME)


def keep_profile(data_dir: Path) -> None:
    """Keep what a server measured for the next, as if nothing else had run meanwhile."""
    if (data_dir / PROFILE_NAME).exists():
        text = (data_dir / PROFILE_NAME).read_text()
        part = PROFILE.with_suffix(f".{os.getpid()}")
        part.write_text(re.sub(r'("undisturbed": *)[0-9.e-]+', r"\g<1>1.0", text))
        part.replace(PROFILE)


class ServerProcess:
    """A server on a port of its own; its log is kept for the message of a failed test."""

    def __init__(self, command: list[str], log: Path, *, wait_s: float) -> None:
        self._log = log
        at = command.index("--data-dir") if "--data-dir" in command else None
        data_dir = None if at is None else Path(command[at + 1])
        if data_dir is not None:
            lend_profile(data_dir)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("REJOINDER_")
        }
        self._output = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=self._output,
        )
        assert self._process.stdout is not None
        self._stdout: IO[bytes] = self._process.stdout
        self.url = self._wait_until_it_serves(wait_s)
        if data_dir is not None:
            keep_profile(data_dir)

    def _wait_until_it_serves(self, wait_s: float) -> str:
        deadline = time.monotonic() + wait_s
        said = b""
        while time.monotonic() < deadline:
            readable, _, _ = select.select([self._stdout], [], [], 0.5)
            if readable:
                more = os.read(self._stdout.fileno(), 4096)
                said += more
                match = SERVES.search(said.decode())
                if match is not None:
                    return match[1]
                if not more:
                    break
        self.stop()
        raise RuntimeError(f"the server did not start: {said.decode()}\n{self._log.read_text()}")

    @property
    def pid(self) -> int:
        """Of the web process; the engine is a child of it."""
        return self._process.pid

    def stop(self) -> None:
        """End it as an operator would; kill it when it does not listen."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._output.close()

"""A server as a process of its own, for benchmarks that talk to it over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from benchmarks.report import Refused

START_S = 240.0
STOP_S = 30.0


class HttpProcess:
    """Started by the constructor; everything that it prints goes to `log`."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Raises Refused when the program cannot be run."""
        self._log, self._program = log, Path(command[0]).name
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            raise Refused(f"{command[0]} cannot be run: {error.strerror}") from None

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, ready: Callable[[], str | None]) -> str:
        """Return what `ready` does once it is not None. Raises Refused when that never comes."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            found = ready()
            if found is not None:
                return found
            time.sleep(0.1)
        self.stop()
        last = " ".join(self.log_text().strip().splitlines()[-3:])
        raise Refused(f"{self._program} did not begin to serve: {last}")

    def stop(self) -> None:
        """End it as an operator would; kill it when it does not listen."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def answers(url: str) -> bool:
    """Whether a GET of `url` is answered with 200."""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False

"""Progress lines of long steps, for a terminal or a log. Standard library only."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HEARTBEAT_S = 10.0

Progress = Callable[[str], None]


class StepFailed(Exception):
    """A step of the set-up could not be done; the message is for the operator."""


@contextlib.contextmanager
def step(title: str) -> Iterator[Progress]:
    """Print a step's start and end, with elapsed time; yields a printer of lines in between.

    While nothing is printed a line every ten seconds says that the step still runs.
    """
    start = time.monotonic()
    ended = threading.Event()
    printed = threading.Event()

    def progress(line: str) -> None:
        printed.set()
        print(f"[{time.monotonic() - start:5.1f} s]   {line}", flush=True)

    def heartbeat() -> None:
        while not ended.wait(HEARTBEAT_S):
            if not printed.is_set():
                print(f"[{time.monotonic() - start:5.1f} s]   still at it: {title}", flush=True)
            printed.clear()

    print(f"==> {title}", flush=True)
    thread = threading.Thread(target=heartbeat, name="progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()
    print(f"[{time.monotonic() - start:5.1f} s]   done: {title}", flush=True)


def run_pip(python: str | Path, arguments: Sequence[str | Path], progress: Progress) -> None:
    """Run pip of an interpreter, without the lines that say that nothing was to do.

    Raises StepFailed.
    """

    def show(line: str) -> None:
        if not line.startswith(("Requirement already satisfied", "Looking in ")):
            progress(line)

    options = ["--disable-pip-version-check", "--progress-bar", "off"]
    try:
        run_command([python, "-m", "pip", *arguments, *options], show)
    except StepFailed as error:
        raise StepFailed(f"pip {arguments[0]}: {error}") from error


def run_command(command: Sequence[str | Path], progress: Progress, cwd: Path | None = None) -> None:
    """Run a command and pass its output on line by line.

    Raises StepFailed when it cannot be started or fails.
    """
    name = Path(command[0]).name
    try:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise StepFailed(f"{name} cannot be started: {error.strerror}") from error
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                progress(line.rstrip())
    if process.returncode:
        raise StepFailed(
            f"{name} failed with exit status {process.returncode}; see its lines above"
        )

"""One server to a data directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

LOCK_NAME = "rejoinder.lock"


class DataDirectoryBusy(Exception):
    """Another process works on the data directory."""


@contextlib.contextmanager
def lock_data_dir(data_dir: Path) -> Iterator[None]:
    """Hold the data directory, which is made when missing. Raises DataDirectoryBusy.

    The lock belongs to the process: the system drops it however the process ends.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    path = data_dir / LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise DataDirectoryBusy(
                f"the data directory {data_dir} is in use by process {holder}; "
                "stop it, or give another directory with --data-dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)

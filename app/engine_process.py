"""Composes the engine process: engine and chunk store. Run by `engine.client`, never by hand."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import socket
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from app.logs import configure_logging
from app.scratch_store import scratch_store
from engine.config import EngineConfig
from engine.process import ORPHAN_LIMIT_S, Emit, EngineCore, preload, serve
from engine.profile.disk import DiskNotMeasured, disk_read
from sessions.chunks import ChunkStore, ChunkStoreError, StoreLockedError

log = logging.getLogger(__name__)


def open_store(config: EngineConfig) -> ChunkStore | None:
    """The chunk store; None when no directory is given for it.

    The engine of a killed app may still be flushing into it: it is waited for. Raises
    StoreLockedError when another server has the store, and what else `ChunkStore` raises.
    """
    if not config.checkpoint_dirs:
        return None
    directories = [Path(directory) for directory in config.checkpoint_dirs]
    patience_ends = time.monotonic() + 2 * ORPHAN_LIMIT_S
    while True:
        try:
            return ChunkStore(directories, config.checkpoint_cap_bytes)
        except StoreLockedError:
            if time.monotonic() > patience_ends:
                raise
        time.sleep(0.05)


def with_measured_disk(config: EngineConfig) -> EngineConfig:
    """The configuration with the figures of its disk, where the choice of plans needs them.

    Of several disks those of the slowest: a chat lies on one, and nobody knows on which when its
    plan is chosen.
    """
    if config.checkpoint_method != "auto" or not config.checkpoint_dirs or not config.profile_path:
        return config
    disks = []
    for directory in map(Path, config.checkpoint_dirs):
        try:
            disks.append(disk_read(config, directory, partial(scratch_store, directory)))
        except (DiskNotMeasured, ChunkStoreError) as error:
            log.warning("the disk of %s could not be measured: %s", directory, error)
    if not disks:
        return config
    return msgspec.structs.replace(config, disk=min(disks, key=lambda one: one.bytes_per_s))


def make_engine(config: EngineConfig, emit: Emit, at_end: ExitStack) -> EngineCore:
    """The engine with its chunk store, ready to serve; `at_end` closes the store."""
    # Not imported before: torch reads its thread settings when it is imported.
    from engine.engine import Engine

    store = open_store(config)
    if store is not None:
        at_end.callback(store.close)
    return Engine(with_measured_disk(config), store, emit)


def main() -> int:
    """Serve the app at the other end of the given socket; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=("console", "json"), default="console")
    parser.add_argument("--threads", type=int, default=0, help="as in the configuration")
    parser.add_argument("socket", type=int, help="file descriptor of a connected socket")
    arguments = parser.parse_args()
    faulthandler.enable()
    configure_logging(arguments.log_level, arguments.log_format, process="engine")
    with socket.socket(fileno=arguments.socket) as sock, ExitStack() as at_end:
        sock.set_inheritable(False)
        preload(arguments.threads)
        return serve(partial(make_engine, at_end=at_end), sock)


if __name__ == "__main__":
    sys.exit(main())

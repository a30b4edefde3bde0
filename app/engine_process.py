"""Composes the engine process: engine and chunk store. Run by `engine.client`, never by hand."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import socket
import sys
from pathlib import Path

from engine.config import EngineConfig
from engine.process import Emit, EngineCore, serve


def make_engine(config: EngineConfig, emit: Emit) -> EngineCore:
    """The engine with its chunk store; none when no directory is given for it."""
    # Imported here: torch reads its thread settings when it is imported.
    from engine.engine import Engine
    from sessions.chunks import ChunkStore

    store = None
    if config.checkpoint_dirs:
        directories = [Path(directory) for directory in config.checkpoint_dirs]
        store = ChunkStore(directories, cap_bytes=config.checkpoint_cap_bytes)
    return Engine(config, store, emit)


def main() -> int:
    """Serve the app at the other end of the given socket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("socket", type=int, help="file descriptor of a connected socket")
    arguments = parser.parse_args()
    faulthandler.enable()
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s engine %(levelname)s %(name)s: %(message)s",
    )
    with socket.socket(fileno=arguments.socket) as sock:
        sock.set_inheritable(False)
        return serve(make_engine, sock)


if __name__ == "__main__":
    sys.exit(main())

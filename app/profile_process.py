"""Measures this machine for one model. Run by `rejoinder profile` and `plan`, never by hand.

A process of its own, because the command line never imports torch: the configuration comes as
JSON on standard input, progress goes to standard output, figures to the profile's file.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

import msgspec

from app.scratch_store import scratch_store
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.profile.disk import DiskNotMeasured, disk_read
from engine.profile.measure import measure_model
from sessions.chunks import ChunkStoreError


def main() -> int:
    """Measure what is not kept yet, or everything when given `--again`; returns the exit code."""
    again = "--again" in sys.argv[1:]
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        for directory in config.checkpoint_dirs:
            place = Path(directory)
            disk_read(config, place, partial(scratch_store, place), again=again)
        measure_model(config, again=again)
    except (DiskNotMeasured, ChunkStoreError, EngineError) as error:
        logging.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

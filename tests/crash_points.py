"""Crashes at drawn moments of drawn lives of the database and the chunk store.

`python -m tests.crash_points [10000] [--seed 0] [--first-life N]` records every change that a life
makes to its files, stops it at drawn ones, makes the disk that a kill or a loss of power may leave,
starts on that and compares with what had been acknowledged. Prints the count; ends with 1 at the
first fault, which names the life and the point to try again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sessions.migrate import upgrade
from tests.crash.disk import Disk
from tests.crash.judge import judge_database, judge_start, judge_store
from tests.crash.life import Doing, Life
from tests.crash.recording import Op, Recording, UnsupportedHere, recorded
from tests.sessions.chunk_support import memory_directory

POINTS_OF_A_LIFE = 150
WEIGHTS = {"eviction": 4, "compaction": 4, "purge": 4}  # what not every life has; others 1
WHOLE_START_EVERY = 10  # the others open the database by SQLite alone, which is what recovers it


def run_life(
    root: Path, template: Path, seed: int, points: int, counts: Counter[str]
) -> str | None:
    """Record one life and crash it at so many points; what was wrong, None for nothing."""
    data = root / "data"
    data.mkdir()
    shutil.copy(template, data / "rejoinder.db")
    disk = Disk(data)
    recording = Recording(str(data))
    life = Life(data, seed, recording)
    with recorded(recording):
        asyncio.run(life.live())
    counts["lives"] += 1
    counts["compactions in them"] += life.compactions
    counts["evictions in them"] += life.evictions
    counts["changes recorded"] += len(recording.ops)
    rng = random.Random(f"points {seed}")
    kinds = kinds_of(recording.ops)
    places: dict[str, list[int]] = {}
    for n, kind in kinds.items():
        places.setdefault(kind, []).append(n)
    # kinds of changes are drawn first, however many changes there are of each
    weights = [WEIGHTS.get(kind.rpartition(": ")[2], 1) for kind in places]
    chosen = sorted(
        rng.choice(place) for place in rng.choices(list(places.values()), weights, k=points)
    )
    applied = 0
    for serial, point in enumerate(chosen):
        for op in recording.ops[applied:point]:
            disk.apply(op)
        applied = point
        left = root / "left"
        left.mkdir()
        draw = random.Random(f"{seed} {serial}")
        how = disk.crash(left, draw, recording.ops[point] if draw.random() < 0.5 else None)
        events = [op.event for op in recording.ops[:point] if op.kind == "event"]
        try:
            judge_database(left / "rejoinder.db", events)
            judge_store([left / one.name for one in life.dirs], life.cap, events)
            if serial % WHOLE_START_EVERY == 0:
                asyncio.run(judge_start(left / "rejoinder.db", events))
        except Exception:
            what = recording.ops[point]
            return (
                f"life {seed}, point {serial} ({how} at {what.kind} of {Path(what.path).name}, "
                f"change {point} of {len(recording.ops)}, {kinds[point]}):\n"
                f"{traceback.format_exc()}"
            )
        counts[how] += 1
        counts[f"at {kinds[point]}"] += 1
        counts["points"] += 1
        shutil.rmtree(left)
    shutil.rmtree(data)
    return None


def kinds_of(ops: Sequence[Op]) -> dict[int, str]:
    """Which file each change was made to, and what for."""
    doing = {"database": "start", "store": "start"}
    kinds = {}
    for n, op in enumerate(ops):
        if isinstance(op.event, Doing):
            doing[op.event.where] = op.event.what
        elif op.kind != "event":
            if "rejoinder.db" in op.path:
                kinds[n] = f"the database: {doing['database']}"
            else:
                file = "index" if "index.sqlite3" in op.path else "files"
                kinds[n] = f"the store's {file}: {doing['store']}"
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first life")
    chosen = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # what a start mends is told there
    began = time.monotonic()
    counts: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as name,
        memory_directory(Path(name)) as memory,
    ):
        template = Path(name) / "template.db"
        upgrade(template, Path(name) / "backups", lambda line: None)
        seed = chosen.seed
        while counts["points"] < chosen.points:
            root = memory / str(seed)
            root.mkdir()
            points = min(POINTS_OF_A_LIFE, chosen.points - counts["points"])
            try:
                fault = run_life(root, template, seed, points, counts)
            except UnsupportedHere as error:
                print(error)
                return 2
            if fault is not None:
                print(f"{counts['points']} crash points were right, then one was not: {fault}")
                return 1
            shutil.rmtree(root)
            seed += 1
            if counts["lives"] % 10 == 0:
                print(f"{counts['points']} of {chosen.points} crash points", file=sys.stderr)
    took = time.monotonic() - began
    print(f"{counts.pop('points')} crash points, nothing lost and nothing wrong, in {took:.0f} s")
    for what, count in sorted(counts.items()):
        print(f"  {what}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

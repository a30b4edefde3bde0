"""What a disk may hold after a crash, given what was asked of it until then.

A killed process loses nothing that the system took. A machine that loses its power keeps what was
synced; of the rest any part may be there: whole writes, single 4 KiB pieces of them, names of new
files, files that were removed.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.recording import Op

PIECE = 4096  # bytes: what a disk writes at once


@dataclass(slots=True, eq=False)
class _Inode:
    """A file's bytes: those that are durable, and the changes since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Op] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Naming:
    """A change of a directory that is not durable yet; without an inode the name goes."""

    path: str
    inode: _Inode | None


class Disk:
    """Owns a replay: `apply` changes in their order, `crash` as often as wanted in between."""

    def __init__(self, root: Path) -> None:
        """Begin with the files that are below `root` now, all of them durable."""
        self._root = str(root)
        self._names: dict[str, _Inode] = {}  # as the running system sees them
        for place, _, files in os.walk(root):
            for name in files:
                path = Path(place, name)
                self._names[str(path)] = _Inode(bytearray(path.read_bytes()))
        self._durable_names = dict(self._names)
        self._namings: list[_Naming] = []

    def apply(self, op: Op) -> None:
        match op.kind:
            case "create":
                self._names[op.path] = _Inode()
                self._namings.append(_Naming(op.path, self._names[op.path]))
            case "unlink":
                self._names.pop(op.path, None)
                self._namings.append(_Naming(op.path, None))
            case "write" | "truncate":
                # a file that was removed while it is open changes unseen
                if op.path in self._names:
                    self._names[op.path].pending.append(op)
            case "sync":
                if op.path in self._names:
                    inode = self._names[op.path]
                    for one in inode.pending:
                        _change(inode.durable, one)
                    inode.pending.clear()
            case "sync dir":
                left = []
                for naming in self._namings:
                    if os.path.dirname(naming.path) == op.path:
                        _rename(self._durable_names, naming)
                    else:
                        left.append(naming)
                self._namings = left

    def crash(self, target: Path, rng: random.Random, during: Op | None) -> str:
        """Write into `target` what is there after a crash; says which kind it was.

        `during` is the change that was under way.
        """
        if rng.random() < 1 / 3:
            kind = "killed"
            contents = {path: _content(inode, None) for path, inode in self._names.items()}
            if during is not None and during.kind == "write" and during.path in contents:
                torn = Op("write", during.path, during.offset, _front(during.data, rng))
                _change(contents[during.path], torn)
        else:
            kind = "power lost"
            names = dict(self._durable_names)
            chance = rng.choice([0.0, 0.5, 0.9, 1.0])
            for naming in self._namings:
                if rng.random() < chance:
                    _rename(names, naming)
            chance = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
            contents = {}
            for path, inode in names.items():
                late = inode.pending
                if during is not None and during.kind in ("write", "truncate"):
                    late = [*late, during] if during.path == path else late
                contents[path] = _content(_Inode(inode.durable, late), (rng, chance))
        for path, content in contents.items():
            place = target / os.path.relpath(path, self._root)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        return kind


def _rename(names: dict[str, _Inode], naming: _Naming) -> None:
    if naming.inode is None:
        names.pop(naming.path, None)
    else:
        names[naming.path] = naming.inode


def _content(inode: _Inode, drawn: tuple[random.Random, float] | None) -> bytearray:
    """The durable bytes with all later changes, or with those that are drawn."""
    content = bytearray(inode.durable)
    for op in inode.pending:
        if drawn is None:
            _change(content, op)
            continue
        rng, chance = drawn
        if op.kind == "truncate":
            if rng.random() < chance:
                _change(content, op)
            continue
        for at in range(0, len(op.data), PIECE):
            if rng.random() < chance:
                piece = op.data[at : at + PIECE]
                _change(content, Op("write", op.path, op.offset + at, piece))
    return content


def _change(content: bytearray, op: Op) -> None:
    if op.kind == "truncate" and op.offset < len(content):
        del content[op.offset :]
    end = op.offset + len(op.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if op.data:
        content[op.offset : end] = op.data


def _front(data: bytes, rng: random.Random) -> bytes:
    """What came through of a write that was cut off."""
    return data[: rng.randrange(len(data) + 1)]

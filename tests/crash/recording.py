"""Records every change that a program makes to the files below a directory, in order.

Python's own calls are seen by wrappers around `os`, SQLite's by a VFS of ours that stands before
its own: both are needed, since SQLite writes from C. What is recorded is what the program asked
of the system, not what reached a disk; `tests.crash.disk` makes disks of it.
"""

from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["create", "write", "truncate", "sync", "sync dir", "unlink", "event"]


@dataclass(frozen=True, slots=True)
class Op:
    """One change; `offset` is also the size of a truncation, bytes."""

    kind: Kind
    path: str = ""
    offset: int = 0
    data: bytes = b""
    event: Any = None


@dataclass(slots=True)
class Recording:
    """Owns the list of changes below `root`. Any thread adds to it."""

    root: str
    ops: list[Op] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, kind: Kind, path: str = "", offset: int = 0, data: bytes = b"") -> None:
        with self.lock:
            self.ops.append(Op(kind, path, offset, data))

    def note(self, event: object) -> None:
        """Something that the program was told, such as that a write is durable."""
        with self.lock:
            self.ops.append(Op("event", event=event))

    def covers(self, path: str) -> bool:
        return path.startswith(self.root)


class UnsupportedHere(Exception):
    """This Python's SQLite cannot be looked into; the message says why."""


# -- Python's calls


@contextlib.contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Record all changes below the recording's root; one at a time in a process."""
    global _active
    assert _active is None, "a recording runs already"
    _install_vfs()
    paths: dict[int, str] = {}
    real = {name: getattr(os, name) for name in _WRAPPED}
    for name, make in _WRAPPED.items():
        setattr(os, name, make(recording, paths, real[name]))
    _active = recording
    try:
        yield
    finally:
        _active = None
        for name, function in real.items():
            setattr(os, name, function)


_active: Recording | None = None


def _open(recording: Recording, paths: dict[int, str], real: Any) -> Any:
    def wrapper(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        name = os.fspath(path)
        new = bool(flags & os.O_CREAT) and not os.path.exists(name)
        fd: int = real(path, flags, *args, **kwargs)
        if isinstance(name, str) and recording.covers(name):
            paths[fd] = name
            if new:
                recording.add("create", name)
        return fd

    return wrapper


def _close(recording: Recording, paths: dict[int, str], real: Any) -> Any:
    def wrapper(fd: int) -> None:
        paths.pop(fd, None)
        real(fd)

    return wrapper


def _pwritev(recording: Recording, paths: dict[int, str], real: Any) -> Any:
    def wrapper(fd: int, buffers: Sequence[Any], offset: int, *args: Any) -> int:
        written: int = real(fd, buffers, offset, *args)
        if fd in paths:
            data = b"".join(bytes(buffer) for buffer in buffers)[:written]
            recording.add("write", paths[fd], offset, data)
        return written

    return wrapper


def _pwrite(recording: Recording, paths: dict[int, str], real: Any) -> Any:
    def wrapper(fd: int, data: Any, offset: int) -> int:
        written: int = real(fd, data, offset)
        if fd in paths:
            recording.add("write", paths[fd], offset, bytes(data)[:written])
        return written

    return wrapper


def _ftruncate(recording: Recording, paths: dict[int, str], real: Any) -> Any:
    def wrapper(fd: int, size: int) -> None:
        real(fd, size)
        if fd in paths:
            recording.add("truncate", paths[fd], size)

    return wrapper


def _fsync(recording: Recording, paths: dict[int, str], real: Any) -> Any:
    def wrapper(fd: int) -> None:
        real(fd)
        if fd in paths:
            recording.add("sync dir" if os.path.isdir(paths[fd]) else "sync", paths[fd])

    return wrapper


def _unlink(recording: Recording, paths: dict[int, str], real: Any) -> Any:
    def wrapper(path: Any, *args: Any, **kwargs: Any) -> None:
        real(path, *args, **kwargs)
        if recording.covers(os.fspath(path)):
            recording.add("unlink", os.fspath(path))

    return wrapper


_WRAPPED = {
    "open": _open,
    "close": _close,
    "pwritev": _pwritev,
    "pwrite": _pwrite,
    "ftruncate": _ftruncate,
    "fsync": _fsync,
    "unlink": _unlink,
}


# -- SQLite's calls: the structures are those of its public header

_POINTER = ctypes.c_void_p
_OPEN = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, _POINTER, ctypes.c_int, ctypes.POINTER(ctypes.c_int)
)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_char_p, ctypes.c_int)
_CLOSE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER, ctypes.c_int, ctypes.c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_int64)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_int)

_CREATE = 0x00000004
_JOURNALS = 0x00000800 | 0x00004000 | 0x00080000  # main journal, super journal, log


class _Vfs(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("file_size", ctypes.c_int),
        ("max_path", ctypes.c_int),
        ("next", _POINTER),
        ("name", ctypes.c_char_p),
        ("app_data", _POINTER),
        ("open", _OPEN),
        ("delete", _DELETE),
        *((f"rest{n}", _POINTER) for n in range(14)),
    )


class _Methods(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        ("close", _CLOSE),
        ("read", _POINTER),
        ("write", _WRITE),
        ("truncate", _TRUNCATE),
        ("sync", _SYNC),
        *((f"rest{n}", _POINTER) for n in range(13)),
    )


class _File(ctypes.Structure):
    _fields_ = (("methods", ctypes.POINTER(_Methods)),)


@dataclass(slots=True)
class _Opened:
    path: str
    real: _Methods
    sync_dir: bool  # SQLite syncs a journal's directory when it first syncs that


_opened: dict[int, _Opened] = {}
_kept: list[Any] = []  # what SQLite points to must live as long as the process
_patched: dict[int, _Methods] = {}


def _install_vfs() -> None:
    """Make ours the VFS of all connections opened from now on. Raises UnsupportedHere."""
    if _kept:
        return
    try:
        library = ctypes.CDLL(_sqlite3.__file__)
        find, register = library.sqlite3_vfs_find, library.sqlite3_vfs_register
    except (OSError, AttributeError) as error:
        raise UnsupportedHere(f"SQLite's library cannot be called: {error}") from error
    find.restype = ctypes.POINTER(_Vfs)
    find.argtypes = [ctypes.c_char_p]
    register.argtypes = [ctypes.POINTER(_Vfs), ctypes.c_int]
    found = find(None)
    if not found or found.contents.version < 1:
        raise UnsupportedHere("SQLite has no VFS")
    real = found.contents
    ours = _Vfs()
    ctypes.memmove(ctypes.byref(ours), ctypes.byref(real), ctypes.sizeof(_Vfs))
    ours.name = b"recording"

    def open_file(vfs: Any, name: Any, file: Any, flags: int, out: Any) -> int:
        path = ctypes.string_at(name).decode() if name else ""
        active = _active
        watched = bool(path) and active is not None and active.covers(path)
        new = watched and not os.path.exists(path)
        code: int = real.open(vfs, name, file, flags, out)
        if watched and code == 0 and active is not None:
            if new:
                active.add("create", path)
            _watch(file, path, bool(flags & _CREATE and flags & _JOURNALS))
        return code

    def delete(vfs: Any, name: bytes, sync_dir: int) -> int:
        code: int = real.delete(vfs, name, sync_dir)
        path = name.decode()
        if code == 0 and _active is not None and _active.covers(path):
            _active.add("unlink", path)
            if sync_dir:
                _active.add("sync dir", os.path.dirname(path))
        return code

    ours.open, ours.delete = _OPEN(open_file), _DELETE(delete)
    _kept.extend([ours, ours.open, ours.delete, library])
    if register(ctypes.byref(ours), 1):
        raise UnsupportedHere("SQLite takes no VFS")


def _watch(file: int, path: str, sync_dir: bool) -> None:
    """Have an open file's changes come to us first."""
    opened = ctypes.cast(file, ctypes.POINTER(_File)).contents
    address = ctypes.addressof(opened.methods.contents)
    real = opened.methods.contents
    if address not in _patched:
        methods = _Methods()
        ctypes.memmove(ctypes.byref(methods), ctypes.byref(real), ctypes.sizeof(_Methods))
        methods.close, methods.write = _CLOSE(_close_file), _WRITE(_write_file)
        methods.truncate, methods.sync = _TRUNCATE(_truncate_file), _SYNC(_sync_file)
        _patched[address] = methods
    _opened[file] = _Opened(path, real, sync_dir)
    opened.methods = ctypes.pointer(_patched[address])


def _close_file(file: int) -> int:
    return int(_opened.pop(file).real.close(file))


def _write_file(file: int, data: int, size: int, offset: int) -> int:
    one = _opened[file]
    code = int(one.real.write(file, data, size, offset))
    if code == 0 and _active is not None:
        _active.add("write", one.path, offset, ctypes.string_at(data, size))
    return code


def _truncate_file(file: int, size: int) -> int:
    one = _opened[file]
    code = int(one.real.truncate(file, size))
    if code == 0 and _active is not None:
        _active.add("truncate", one.path, size)
    return code


def _sync_file(file: int, flags: int) -> int:
    one = _opened[file]
    code = int(one.real.sync(file, flags))
    if code == 0 and _active is not None:
        _active.add("sync", one.path)
        if one.sync_dir:
            one.sync_dir = False
            _active.add("sync dir", os.path.dirname(one.path))
    return code

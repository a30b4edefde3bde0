"""The writer thread: the only one that changes index and files."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sessions.chunks.append import Append, write_group
from sessions.chunks.compaction import compact
from sessions.chunks.rows import is_damage
from sessions.chunks.state import StoreState

log = logging.getLogger(__name__)

_MAX_GROUP_FILES = 64  # open at once
_MAX_GROUP_BYTES = 32 << 20  # what the caller gets back only when the group is durable
_IDLE_S = 0.5  # seconds without work before anything is tidied


@dataclass(slots=True, eq=False)
class Forget:
    """Delete owners; with `only_file` while that is still their file."""

    owners: list[str]
    only_file: str = ""


@dataclass(slots=True, eq=False)
class Reject:
    """Take a bad stripe out of the index."""

    owner: str
    stripe_id: int


@dataclass(slots=True, eq=False)
class Collect:
    """Delete stripes of other fingerprints."""

    fingerprint: bytes


@dataclass(slots=True, eq=False)
class Compact:
    """Compact every file that wastes more than half of its bytes."""


@dataclass(slots=True, eq=False)
class Rebuild:
    """The index was found damaged."""


@dataclass(slots=True, eq=False)
class Barrier:
    """Tells when all before it is done; `reached` only if the writer got so far alive."""

    event: threading.Event = field(default_factory=threading.Event)
    reached: bool = False


Operation = Append | Forget | Reject | Collect | Compact | Rebuild | Barrier


class Writer:
    """Owns the thread that carries operations out, in the order they were given."""

    def __init__(self, state: StoreState, on_end: Callable[[], None]) -> None:
        self._state = state
        self._on_end = on_end
        self._queue: deque[Operation] = deque()
        self._batch: deque[Operation] = deque()  # taken from the queue, not yet begun
        self._wake = threading.Condition()
        self._closing = False
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="chunk-writer", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> bool:
        """Queue an operation; False when the thread has ended and it will not be done."""
        with self._wake:
            if self._dead or self._closing:
                return False
            self._queue.append(operation)
            self._wake.notify()
        return True

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._guard(self._state.settle)
            while self._round():
                pass
            self._state.hook("close")
            self._state.close_index()
        except BaseException:  # the thread's boundary: nothing is written after an unknown failure
            log.exception("chunk store: the writer thread failed; nothing more is saved")
            self._state.abandon()
        finally:
            with self._wake:
                self._dead = True
                left = [*self._batch, *self._queue]
                self._batch.clear()
                self._queue.clear()
            self._on_end()
            for operation in left:
                if isinstance(operation, Append):
                    operation.finish(self._state.counters)
                elif isinstance(operation, Barrier):
                    operation.event.set()

    def _round(self) -> bool:
        """Do what is queued; False when closed and nothing is left."""
        if not self._take():
            return False
        if not self._batch:
            self._tidy()
        while self._batch:
            if group := self._next_group():
                self._append(group)
            else:
                self._do(self._batch.popleft())
        return True

    def _take(self) -> bool:
        """Move all that is queued to the batch, which stays empty after an idle while where there
        is something to tidy; False to end."""
        with self._wake:
            idle_until = time.monotonic() + _IDLE_S
            while not self._queue:
                if self._closing:
                    return False
                if not self._state.wasteful and not self._state.audit_due:
                    self._wake.wait()
                    idle_until = time.monotonic() + _IDLE_S
                elif not self._wake.wait(max(0.0, idle_until - time.monotonic())):
                    return True
            self._batch.extend(self._queue)
            self._queue.clear()
        return True

    def _next_group(self) -> list[Append]:
        """Appends at the head of the batch that are made durable together."""
        group: list[Append] = []
        owners: set[str] = set()
        num_bytes = 0
        while self._batch and isinstance(operation := self._batch[0], Append):
            owners.add(operation.owner)
            num_bytes += operation.layout.payload_bytes
            if group and (len(owners) > _MAX_GROUP_FILES or num_bytes > _MAX_GROUP_BYTES):
                break
            group.append(operation)
            self._batch.popleft()
        return group

    def _append(self, group: list[Append]) -> None:
        try:
            self._guard(lambda: write_group(self._state, group))
        finally:
            for append in group:
                append.finish(self._state.counters)

    def _do(self, operation: Operation) -> None:
        state = self._state
        if isinstance(operation, Forget):
            self._guard(lambda: state.forget(operation.owners, operation.only_file))
            with state.catalog.lock:
                for owner in operation.owners:
                    state.catalog.doomed[owner] -= 1
                    if state.catalog.doomed[owner] <= 0:
                        del state.catalog.doomed[owner]
        elif isinstance(operation, Reject):
            self._guard(lambda: state.remove_stripes(operation.owner, [operation.stripe_id]))
        elif isinstance(operation, Collect):
            self._guard(lambda: state.collect(operation.fingerprint))
        elif isinstance(operation, Rebuild):
            state.rebuild_index()
        elif isinstance(operation, Barrier):
            self._guard(state.compare)
            operation.reached = True
            operation.event.set()
        elif isinstance(operation, Compact):
            while state.wasteful:
                self._compact_one()

    def _tidy(self) -> None:
        """One thing that can wait until nothing is asked for."""
        if self._state.audit_due:
            self._guard(self._state.compare)
        else:
            self._compact_one()

    def _compact_one(self) -> None:
        if self._state.wasteful:
            owner = self._state.wasteful.pop()
            self._guard(lambda: compact(self._state, owner))

    def _guard(self, step: Callable[[], None]) -> None:
        """Carry a step out; a failing disk costs that step, a damaged index is made anew."""
        try:
            step()
        except sqlite3.Error as error:
            self._state.refused(error)
            if is_damage(error):
                self._state.rebuild_index()
        except OSError as error:
            log.warning("chunk store: %s", error)

"""The reader threads and the memory they read into."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Protocol

from sessions.chunks.layout import align_up

_IDLE_BUFFER_BYTES = 64 << 20  # kept for later reads
_BUFFER_UNIT = 1 << 20


class Buffer:
    """Page-aligned memory that one request is read into."""

    def __init__(self, num_bytes: int) -> None:
        self.size = num_bytes
        self.memory = mmap.mmap(-1, num_bytes)
        self.view = memoryview(self.memory)
        self.charged = 0  # bytes of the budget that it takes
        self.users = 0  # stripes in it that are not released yet


class Source(Protocol):
    """What wants to read."""

    def next_job(self) -> Callable[[], None] | None:
        """The next read to carry out, as begun; None when there is none now. Lock held."""

    def cancel(self) -> None:
        """Want no more."""


class ReadPool:
    """Owns the reader threads and their idle buffers. Any thread may call it."""

    def __init__(self, num_threads: int) -> None:
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        self.ready = threading.Condition(self.lock)
        self._streams: list[Source] = []
        self._idle: list[Buffer] = []
        self._idle_bytes = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"chunk-reader-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, stream: Source) -> None:
        with self.lock:
            self._streams.append(stream)
            self.work.notify(len(self._threads))

    def close(self) -> None:
        """Cancel every stream and end the threads."""
        with self.lock:
            self._closed = True
            streams = list(self._streams)
            self.work.notify_all()
        for stream in streams:
            stream.cancel()
        for thread in self._threads:
            thread.join()

    def take_buffer(self, num_bytes: int) -> Buffer:
        """A buffer of at least `num_bytes`, the smallest idle one that does.

        Raises OSError or MemoryError when there is no memory for a new one.
        """
        size = align_up(num_bytes, _BUFFER_UNIT)
        with self.lock:
            fitting = [buffer for buffer in self._idle if size <= buffer.size <= 2 * size]
            if fitting:
                buffer = min(fitting, key=lambda one: one.size)
                self._idle.remove(buffer)
                self._idle_bytes -= buffer.size
                return buffer
        return Buffer(size)

    def give_buffer(self, buffer: Buffer) -> None:
        """Keep a buffer for later, or let it go. Lock held."""
        if self._idle_bytes + buffer.size <= _IDLE_BUFFER_BYTES:
            self._idle.append(buffer)
            self._idle_bytes += buffer.size

    def _run(self) -> None:
        while True:
            with self.lock:
                job = self._next()
                while job is None:
                    if self._closed:
                        return
                    self.work.wait()
                    job = self._next()
            job()

    def _next(self) -> Callable[[], None] | None:
        """The next read of the first stream that has one. Lock held."""
        for stream in self._streams:
            job = stream.next_job()
            if job is not None:
                return job
        return None

    def remove(self, stream: Source) -> None:
        """No more reads of this stream. Lock held."""
        if stream in self._streams:
            self._streams.remove(stream)

"""The engine process: one loop on the main thread, and two threads that only move bytes."""

from __future__ import annotations

import importlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Protocol

import msgspec

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.framing import FrameSplitter, frame, to_engine_decoder
from engine.free_memory import settle_memory
from engine.messages import (
    EngineInfo,
    Failed,
    Fatal,
    Forget,
    Forgotten,
    FromEngine,
    Shutdown,
    Submit,
    ToEngine,
)
from kernels.threading import configure_environment

log = logging.getLogger(__name__)

Emit = Callable[[FromEngine], None]
Inbox = queue.SimpleQueue[ToEngine]

ORPHAN_LIMIT_S = 5.0  # for the last flush, once the app is gone
MAX_FAILURES = 5  # steps that fail one after the other before the process gives up
INTERNAL = "The engine had an internal error. Its log says more."


class EngineCore(Protocol):
    """What the loop drives. Called from the main thread only."""

    @property
    def info(self) -> EngineInfo: ...

    def handle(self, message: ToEngine) -> None:
        """Take in one message (never `Shutdown`); answers go through `emit`."""

    def has_work(self) -> bool:
        """There is something for `step` to do now."""

    def step(self) -> None:
        """One step: schedule, run, emit."""

    def idle_wait(self) -> float | None:
        """Seconds until `idle_tick` is due when no message comes; None: no need."""

    def idle_tick(self) -> None:
        """Housekeeping that is due, such as evicting idle chats."""

    def fail_all(self, reason: str) -> None:
        """Fail every request with kind "internal" and go back to a sound, empty state."""

    def close(self) -> None:
        """Flush checkpoints and end threads."""


MakeEngine = Callable[[EngineConfig, Emit], EngineCore]


class _Sender:
    """A thread that writes what `emit` was given; a slow app never holds up the engine."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def emit(self, message: FromEngine) -> None:
        """Send without waiting. Any thread."""
        self._queue.put(message)

    def close(self) -> None:
        """Wait until everything was sent."""
        self._queue.put(None)
        self._thread.join(ORPHAN_LIMIT_S)

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            ended = batch[-1] is None
            try:
                self._sock.sendall(b"".join(frame(message) for message in batch if message))
            except OSError:
                return  # the app is gone, which the reader sees too


def _read(sock: socket.socket, splitter: FrameSplitter, inbox: Inbox) -> None:
    """Reader thread: put messages into the inbox until the app's end of the socket closes."""
    try:
        while data := sock.recv(1 << 18):
            for body in splitter.feed(data):
                inbox.put(to_engine_decoder.decode(body))
    except OSError:
        pass
    except (ValueError, msgspec.DecodeError):
        log.exception("the app sent what is no message")
    inbox.put(Shutdown())
    time.sleep(ORPHAN_LIMIT_S)  # this thread is a daemon: it gets no further if the loop ends
    log.error("the app is gone and the engine did not end in time; it is ended now")
    os._exit(1)


def end_with_any_thread() -> None:
    """From now on a thread that fails ends the process: the app sees it and starts another.

    Without one that moves its bytes the engine would live on and be heard by nobody.
    """

    def failed(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "a thread"
        error = args.exc_value
        log.critical(
            "the thread %s failed, so the engine ends: %s: %s", name, args.exc_type.__name__, error,
            exc_info=error,
        )  # fmt: skip
        logging.shutdown()
        os._exit(1)

    threading.excepthook = failed


def preload(num_threads: int) -> None:
    """Import what an engine needs, with the threads that its configuration will name.

    What fails is told to the app when the engine is made.
    """
    configure_environment(num_threads)
    with suppress(Exception):
        importlib.import_module("engine.engine")


def serve(make_engine: MakeEngine, sock: socket.socket) -> int:
    """Run an engine for the app at the other end of `sock`; returns the exit code.

    The first frame is the configuration. Thread settings are applied before `make_engine`, which
    is the one to import torch. Ends on `Shutdown`, on SIGTERM and when the app is gone. SIGINT is
    ignored: Ctrl-C reaches the whole process group, and the app then shuts the engine down.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_any_thread()
    splitter = FrameSplitter()
    bodies: list[bytes] = []
    while not bodies:
        data = sock.recv(1 << 18)
        if not data:
            return 1
        bodies = splitter.feed(data)
    config = msgspec.msgpack.decode(bodies[0], type=EngineConfig)
    configure_environment(config.num_threads)

    inbox: Inbox = queue.SimpleQueue()
    for body in bodies[1:]:
        inbox.put(to_engine_decoder.decode(body))

    def terminate(signum: int, stack: FrameType | None) -> None:
        inbox.put(Shutdown())  # SimpleQueue.put may be called from a signal handler

    signal.signal(signal.SIGTERM, terminate)
    sender = _Sender(sock)
    threading.Thread(target=_read, args=(sock, splitter, inbox), name="reader", daemon=True).start()
    try:
        engine = make_engine(config, sender.emit)
    except ModelError as error:
        sender.emit(Fatal(reason=str(error)))
        sender.close()
        return 1
    except Exception as error:
        log.exception("the engine could not start")
        sender.emit(Fatal(reason=f"the engine could not start: {type(error).__name__}: {error}"))
        sender.close()
        return 1
    settle_memory()
    sender.emit(engine.info)
    try:
        return _loop(engine, inbox, sender.emit)
    finally:
        engine.close()
        sender.close()


def _loop(engine: EngineCore, inbox: Inbox, emit: Emit) -> int:
    """Messages, then a step, as long as there is work; sleep on the inbox otherwise."""
    failures = 0
    while True:
        message: ToEngine | None = None
        try:
            if not engine.has_work():
                wait_s = engine.idle_wait()
                try:
                    message = inbox.get(timeout=None if wait_s is None else max(0.0, wait_s))
                except queue.Empty:
                    engine.idle_tick()
                    continue
            while message is not None or not inbox.empty():
                message = inbox.get() if message is None else message
                if isinstance(message, Shutdown):
                    return 0
                engine.handle(message)
                message = None
            if engine.has_work():
                engine.step()
            failures = 0
        except Exception:  # the loop's boundary: whatever it was, nobody may wait for ever
            log.exception("the engine failed")
            failures += 1
            _answer_failed(message, emit)
            engine.fail_all(INTERNAL)
            if failures >= MAX_FAILURES:
                log.error("%d failures one after the other: the engine ends", failures)
                return 1


def _answer_failed(message: ToEngine | None, emit: Emit) -> None:
    """Answer the message whose handling raised."""
    if isinstance(message, Submit):
        emit(Failed(request_id=message.request_id, kind="internal", reason=INTERNAL))
    elif isinstance(message, Forget):
        emit(Forgotten(call_id=message.call_id, error=INTERNAL))

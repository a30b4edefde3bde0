"""The engine process as the app sees it: a child with one end of a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence

import msgspec

from engine.config import EngineConfig
from engine.framing import FrameSplitter, frame, from_engine_decoder
from engine.messages import FromEngine, ToEngine

log = logging.getLogger(__name__)

Receive = Callable[[FromEngine], None]


class EngineProcess(asyncio.Protocol):
    """One child process and the socket to it. Used on one event loop.

    The child holds the only other end of the socket, so either side's death, however sudden, is
    the end of file of the other.
    """

    def __init__(self) -> None:
        """Use `spawn`."""
        self.closed = asyncio.Event()  # the socket ended: the process is dead or dying
        self._receive: Receive | None = None
        self._splitter = FrameSplitter()
        self._first: asyncio.Future[FromEngine | None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._child: asyncio.subprocess.Process | None = None

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> EngineProcess:
        """Start `command` with its socket's number appended; it waits for `configure`.

        Raises OSError if it cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = cls()
        try:
            with theirs:  # closed here once the child has its copy
                fd = theirs.fileno()
                process._child = await asyncio.create_subprocess_exec(
                    *command, str(fd), pass_fds=(fd,), stdin=asyncio.subprocess.DEVNULL
                )
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: process, sock=ours)
        except BaseException:
            ours.close()
            await process.end(0)
            raise
        return process

    def configure(self, config: EngineConfig, receive: Receive) -> None:
        """Tell the process what it is to be. Its messages after the first go to `receive`."""
        self._receive = receive
        self._write(config)

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def send(self, message: ToEngine) -> None:
        """Send without waiting; dropped when the socket has ended."""
        self._write(message)

    async def first_message(self) -> FromEngine | None:
        """What the process said first; None if it ended without a word."""
        return await asyncio.shield(self._first)

    async def end(self, limit_s: float) -> int | None:
        """Wait up to `limit_s` for the process to end by itself, then kill it; its exit code.

        It is killed too when the waiting is cancelled.
        """
        child = self._child
        if child is not None and child.returncode is None:
            try:
                async with asyncio.timeout(limit_s):
                    await child.wait()
            except (TimeoutError, asyncio.CancelledError) as error:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                if isinstance(error, asyncio.CancelledError):
                    raise
                await child.wait()
        if self._transport is not None:
            self._transport.close()
        return None if child is None else child.returncode

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            messages = [from_engine_decoder.decode(body) for body in self._splitter.feed(data)]
        except (ValueError, msgspec.DecodeError):  # ValidationError is a DecodeError
            log.exception("the engine process sent what is no message; it is given up")
            if self._transport is not None:
                self._transport.abort()
            return
        for message in messages:
            if self._first.done() and self._receive is not None:
                self._receive(message)
            else:
                self._first.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._first.done():
            self._first.set_result(None)
        self.closed.set()

    def _write(self, message: msgspec.Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

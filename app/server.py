"""Runs the web application under uvicorn, after the checks that must fail before it listens."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import click
import uvicorn

from app.engine_start import EngineStart
from app.logs import configure_logging
from app.progress import step
from app.settings import Settings
from engine.client import Engine
from engine.errors import EngineError
from engine.model.source import EMBEDDED, resolve_model
from sessions.errors import SessionsError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GRACEFUL_SHUTDOWN_S = 10  # then connections that are still open are cut
# The engine's threads wait for each other at every step: with a busy web process beside them on two
# cores a step of 32 chats takes 3.7 times as long at equal priority, 1.25 times at 6 or 7. A page
# of 300 messages then opens in 240 ms while 8 chats decode, at 7 in 380, at 9 in 600.
NICE = 6


class AddressUnusable(Exception):
    """The server cannot listen where it should; the message is for the operator."""


def run_server(settings: Settings, engine: Engine | None = None) -> None:
    """Serve until a signal ends it; with an engine of its own unless one is given.

    Raises AddressUnusable, EngineError and SessionsError, each before anything listens, and
    SystemExit when it could not start for another reason, which was logged.
    """
    with contextlib.ExitStack() as at_end:
        _warn_of_plain_http(settings)
        # First of all: starting the engine takes seconds, a taken port is known at once.
        sockets = [at_end.enter_context(one) for one in bind(settings.host, settings.port)]
        if settings.model != EMBEDDED and engine is None:
            # A download, which a signal ends; that of the embedded model is made by the set-up.
            found = resolve_model(settings.model, settings.data_dir, click.echo)
            settings = settings.model_copy(update={"model": str(found)})
        configure_logging(settings.log_level, settings.log_format, process="web")
        with contextlib.suppress(KeyboardInterrupt):  # raised again after an orderly end
            asyncio.run(_serve(settings, sockets, engine))


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to the addresses of a host, not listening yet. Raises AddressUnusable."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise AddressUnusable(f"--host {host} is no address of a machine: {error}") from error
    with contextlib.ExitStack() as at_failure:
        bound = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = at_failure.enter_context(socket.socket(family, kind, protocol))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                one.bind(address)
            except OSError as error:
                raise AddressUnusable(_why_not(host, port, error)) from error
            bound.append(one)
        at_failure.pop_all()
    return bound


def yield_to_engine() -> None:
    """Lower the calling thread's priority: the engine's cores are the engine's first.

    To be called when the engine process runs; one that is started later begins with it.
    """
    os.nice(NICE)


def _why_not(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"port {port} of {host} is in use, maybe by another server; "
                "stop it, or choose another port with --port"
            )
        case errno.EACCES:
            return f"port {port} of {host} needs more rights; choose one from 1024 on with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host} is no address of this machine; choose another with --host"
        case _:
            return f"port {port} of {host} cannot be opened: {error.strerror}"


def _warn_of_plain_http(settings: Settings) -> None:
    if settings.accounts_required and not settings.public_url.startswith("https://"):
        click.echo(
            "warning: passwords and chats cross the network unencrypted; put a proxy with HTTPS "
            "before the server and set --public-url https://...",
            err=True,
        )


async def _serve(settings: Settings, sockets: list[socket.socket], engine: Engine | None) -> None:
    """Start the engine, and the application beside it; serve until a signal ends it."""
    with contextlib.ExitStack() as starting:
        # The first start on a machine compiles the kernels, which takes a while.
        starting.enter_context(step("starting the engine"))
        start = EngineStart(settings) if engine is None else None
        try:
            app = await asyncio.to_thread(_make_app, settings, engine, start)
            config = uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,  # it has what people search for; ours is in app.request_log
                server_header=False,
                proxy_headers=False,  # whom to believe is our own matter
                timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
            )
            try:
                await _Server(config, starting).serve(sockets)
            except SystemExit:
                if app.fault is None:
                    raise
                raise app.fault from None
        finally:
            if start is not None:
                await start.close()


def _make_app(
    settings: Settings, engine: Engine | None, start: EngineStart | None
) -> _StartupFaults:
    from app import main  # takes about as long to import as what the engine imports

    return _StartupFaults(main.create_app(settings, engine=engine, start=start))


class _StartupFaults:
    """Keeps a known fault of the application's start, which uvicorn would log as a traceback."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app
        self.fault: EngineError | SessionsError | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        failed: Message | None = None

        async def hold_failure(message: Message) -> None:
            nonlocal failed
            if message["type"] == "lifespan.startup.failed":
                failed = message
            else:
                await send(message)

        try:
            await self._app(scope, receive, hold_failure)
        except BaseException as error:
            if failed is None:
                raise
            self.fault = _known_fault(error)
            if self.fault is None:
                await send(failed)
                raise
            await send({"type": "lifespan.startup.failed", "message": ""})


def _known_fault(error: BaseException) -> EngineError | SessionsError | None:
    """Our own error, out of the groups that the framework wraps it in."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, EngineError | SessionsError) else None


class _Server(uvicorn.Server):
    """Says where it listens, with the port that the system chose."""

    def __init__(self, config: uvicorn.Config, starting: contextlib.ExitStack) -> None:
        """starting: closed when it listens."""
        super().__init__(config)
        self._starting = starting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._starting.close()
        yield_to_engine()
        gc.freeze()  # what lives from now to the end need not be looked through again and again
        for server in self.servers:
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                name = f"[{host}]" if ":" in host else host
                click.echo(f"Rejoinder serves on http://{name}:{port}")

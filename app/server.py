"""Runs the web application under uvicorn, after the checks that must fail before it listens."""

from __future__ import annotations

import logging
import socket

import click
import uvicorn

from app.main import create_app
from app.settings import Settings
from engine.model.source import read_model_config, resolve_model

GRACEFUL_SHUTDOWN_S = 10  # then open connections are cut; turns are finished or marked before


def run_server(settings: Settings) -> bool:
    """Serve until a signal ends it; False when it could not start.

    Raises ModelError before anything listens.
    """
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    read_model_config(resolve_model(settings.model, settings.data_dir, click.echo))
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=settings.log_level == "debug",
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )
    server = _Server(config)
    server.run()
    return server.started


class _Server(uvicorn.Server):
    """Says where it listens, with the port that the system chose."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                name = f"[{host}]" if ":" in host else host
                click.echo(f"Rejoinder serves on http://{name}:{port}")

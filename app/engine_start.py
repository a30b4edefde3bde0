"""The engine's start, beside which everything else of a server starts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from app.settings import Settings
from engine.client import DEFAULT_COMMAND, EngineClient
from engine.config import EngineConfig
from engine.model.model_config import read_model_config
from engine.model.source import resolve_model

logger = logging.getLogger(__name__)


class EngineStart:
    """Owns an engine that is starting until somebody takes it. Used on one event loop.

    The engine process imports its libraries while the model is verified.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._model_dir = asyncio.create_task(asyncio.to_thread(self._find_model))
        self._config = asyncio.create_task(self._make_config())
        self._engine = asyncio.create_task(
            EngineClient.start(
                self._config,
                command=[*DEFAULT_COMMAND, *settings.engine_options],
                watchdog_s=settings.watchdog_s,
            )
        )

    async def model_dir(self) -> Path:
        """The directory of the model, verified. Raises ModelError."""
        return await asyncio.shield(self._model_dir)

    async def engine(self) -> EngineClient:
        """The engine, when it can serve. Raises ModelError, EngineUnavailable, OSError."""
        return await asyncio.shield(self._engine)

    async def close(self) -> None:
        """End the engine, started or not. May be called again."""
        self._engine.cancel()
        self._config.cancel()
        tasks = (self._engine, self._config, self._model_dir)
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._engine.cancelled() and self._engine.exception() is None:
            await self._engine.result().close()

    def _find_model(self) -> Path:
        model_dir = resolve_model(self._settings.model, self._settings.data_dir, logger.info)
        read_model_config(model_dir)
        return model_dir

    async def _make_config(self) -> EngineConfig:
        return self._settings.engine_config(await self.model_dir())

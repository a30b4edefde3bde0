"""The check of a running server's data, one at a time, and dropping what it found damaged."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from app.check_process import Checked
from app.settings import Settings
from engine.client import Engine
from engine.errors import EngineUnavailable

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "app.check_process")


@dataclass
class Check:
    """One run; `checked` is None while it goes on."""

    began_at: datetime
    after_repair: bool = False
    checked: Checked | None = None
    dropped: list[str] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.checked is None


class Checks:
    """Owns the last check and its process. Event loop only."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self.last: Check | None = None

    def begin(self) -> Check:
        """Start one, unless one is running."""
        if self.last is None or not self.last.running:
            self._start(Check(began_at=datetime.now(UTC)))
        assert self.last is not None, "one was started just now"
        return self.last

    async def repair(self) -> Check | None:
        """Have the owners dropped that the last check found damaged, then check again.

        That costs time later, never data. None when there is nothing to drop. Raises
        EngineUnavailable.
        """
        last = self.last
        if last is None or last.checked is None or not last.checked.bad_owners:
            return None
        bad = last.checked.bad_owners
        await self._engine.collect(bad)
        again = Check(began_at=datetime.now(UTC), after_repair=True, dropped=list(bad))
        self._start(again)
        return again

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _start(self, check: Check) -> None:
        self.last = check
        self._task = asyncio.create_task(self._run(check), name="check")

    async def _run(self, check: Check) -> None:
        process: asyncio.subprocess.Process | None = None
        checked = Checked(error="The server was stopped.")
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate(self._settings.model_dump_json().encode())
            if process.returncode:
                raise OSError(f"the check ended with code {process.returncode}")
            checked = msgspec.json.decode(output, type=Checked)
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("the check failed: %s", error)
            checked = Checked(error=str(error))
        finally:
            check.checked = checked
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


async def collect(engine: Engine, gone: list[str]) -> int | None:
    """Drop checkpoints of other weights and those of these owners; the bytes that this freed.

    None when the engine does not say. Raises EngineUnavailable.
    """
    before = (await engine.stats()).disk_bytes
    await engine.collect(gone)
    now = before
    for _ in range(SETTLE_LOOKS):
        await asyncio.sleep(SETTLE_S)
        try:
            last, now = now, (await engine.stats()).disk_bytes
        except EngineUnavailable:
            return None
        if now == last:
            break
    return max(0, before - now)


SETTLE_S = 0.25
SETTLE_LOOKS = 20

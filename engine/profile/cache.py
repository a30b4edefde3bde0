"""Measured figures kept between starts, each with what it holds for. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger(__name__)

FORMAT = 1
QUIET = 0.9  # of the time that a figure took, at least so much was its own
T = TypeVar("T", bound=msgspec.Struct)


class _File(msgspec.Struct, frozen=True):
    format: int
    figures: dict[str, msgspec.Raw]


class ProfileCache:
    """Owns one JSON file: figures by the key of what they hold for. One process at a time.

    Without a path nothing is kept. A file that cannot be read counts as empty, and is said once.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._warned = False

    def get(self, key: str, kind: type[T]) -> T | None:
        """The figure kept for this key; None when there is none, or it is damaged."""
        raw = self._figures().get(key)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            self._warn(str(error))
            return None

    def put(self, key: str, value: msgspec.Struct) -> None:
        """Keep a figure beside the others; a disk that does not take it costs a log line."""
        if self._path is None:
            return
        figures = {**self._figures(), key: msgspec.Raw(msgspec.json.encode(value))}
        data = msgspec.json.format(msgspec.json.encode(_File(FORMAT, figures)), indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                os.replace(name, self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            log.warning("the measured profile cannot be kept in %s: %s", self._path, error)

    def obtain(
        self, key: str, kind: type[T], measure: Callable[[], T], *, again: bool = False
    ) -> T:
        """The kept figure; else, or with `again`, a new one, which is kept from now on.

        A figure that was taken beside busy programs is taken anew, and kept where it is better.
        """
        kept = None if again else self.get(key, kind)
        before = getattr(kept, "undisturbed", 1.0)
        if kept is not None and before >= QUIET:
            return kept
        new = measure()
        after = getattr(new, "undisturbed", 1.0)
        if kept is not None and after < before:
            return kept
        if after < QUIET:
            log.warning(
                "other programs took %.0f %% of the time while this machine was measured; "
                "it will be measured again at the next start",
                100 * (1 - after),
            )
        self.put(key, new)
        return new

    def _figures(self) -> dict[str, msgspec.Raw]:
        if self._path is None:
            return {}
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            self._warn(str(error))
            return {}
        return file.figures if file.format == FORMAT else {}

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "the measured profile %s is damaged and will be measured again: %s",
                self._path,
                reason,
            )

"""Column types that keep the records' promises: aware UTC times, exact token ids."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, LargeBinary
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """An aware time, stored in UTC. Raises ValueError for a naive one."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"the time {value.isoformat()} has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        stored: datetime = value
        return stored.replace(tzinfo=UTC) if stored.tzinfo is None else stored.astimezone(UTC)


class TokenIds(TypeDecorator[Sequence[int]]):
    """Token ids as int32, little endian."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Sequence[int] | None, dialect: Dialect) -> bytes | None:
        if value is None:
            return None
        ids = array("i", value)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()

    def process_result_value(self, value: Any, dialect: Dialect) -> list[int] | None:
        if value is None:
            return None
        ids = array("i")
        ids.frombytes(value)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tolist()

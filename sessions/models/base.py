"""What all tables share: naming of constraints, column types, ids."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sessions.column_types import TokenIds, UtcDateTime


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(),
        Sequence[int]: TokenIds(),
    }


def identifier() -> Mapped[str]:
    return mapped_column(String(32), primary_key=True)


def reference(target: str, *, index: bool = True) -> Mapped[str]:
    return mapped_column(String(32), ForeignKey(target), index=index)

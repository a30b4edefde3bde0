"""Ids of rows."""

from __future__ import annotations

from uuid import uuid4


def new_id() -> str:
    """32 random hex digits."""
    return uuid4().hex

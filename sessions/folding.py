"""Case as the search indices see it."""

from __future__ import annotations


def fold(text: str) -> str:
    """The text in lower case, character by character: places in it stay what they are."""
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)

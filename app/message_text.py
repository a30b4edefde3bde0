"""What a posted text may be, and the title that a chat gets from its first one."""

from __future__ import annotations

import re
import unicodedata

from app.faults import InvalidField

TITLE_CHARS = 60
MAX_TITLE_CHARS = 120
UNTITLED = "Untitled"
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_text(raw: str, max_chars: int) -> str:
    """The text as it is stored: CRLF (what forms send) becomes LF, nothing else changes.

    Raises InvalidField for an empty or too long text, NUL, and lone surrogates.
    """
    text = raw.replace("\r\n", "\n")
    if not text.strip():
        raise InvalidField("text", "The message is empty: write something first.")
    _check(text, "text", "message")
    if len(text) > max_chars:
        raise InvalidField(
            "text", f"The message has {len(text):,} characters; up to {max_chars:,} can be sent."
        )
    return text


def clean_title(raw: str) -> str:
    """A title on one line, with something to see. Raises InvalidField."""
    title = " ".join(raw.split())
    _check(title, "title", "title")
    if not _is_visible(title):
        raise InvalidField("title", "The title is empty: write at least one character.")
    if len(title) > MAX_TITLE_CHARS:
        raise InvalidField(
            "title", f"The title has {len(title)} characters; it can have up to {MAX_TITLE_CHARS}."
        )
    return title


def title_of(text: str) -> str:
    """The first words of a text that has some."""
    words = " ".join(text.split())
    if not _is_visible(words):
        return UNTITLED
    if len(words) <= TITLE_CHARS:
        return words
    cut = words[:TITLE_CHARS]
    at_word = cut.rpartition(" ")[0]
    return (at_word or cut) + "…"


def _is_visible(text: str) -> bool:
    """Tell whether anything is neither white space nor a format or control character."""
    return any(unicodedata.category(char)[0] not in "CZ" for char in text)


def _check(text: str, field: str, name: str) -> None:
    at = text.find("\0")
    code = 0
    if at < 0:
        found = _SURROGATE.search(text)
        if found is None:
            return
        at, code = found.start(), ord(found[0])
    raise InvalidField(
        field, f"The {name} holds U+{code:04X} at character {at + 1:,}, which no text can have."
    )

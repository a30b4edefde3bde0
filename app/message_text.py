"""What a posted text may be, and the title that a chat gets from its first one."""

from __future__ import annotations

import re

from app.faults import InvalidField

TITLE_CHARS = 60
MAX_TITLE_CHARS = 120
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_text(raw: str, max_chars: int) -> str:
    """The text as it is stored: CRLF (what forms send) becomes LF, nothing else changes.

    Raises InvalidField for an empty or too long text, NUL, and lone surrogates.
    """
    text = raw.replace("\r\n", "\n")
    if not text.strip():
        raise InvalidField("text", "an empty message", "at least one character")
    _check(text, "text")
    if len(text) > max_chars:
        raise InvalidField("text", f"a text of {len(text):,} characters", f"up to {max_chars:,}")
    return text


def clean_title(raw: str) -> str:
    """A title on one line. Raises InvalidField."""
    title = " ".join(raw.split())
    _check(title, "title")
    if not 1 <= len(title) <= MAX_TITLE_CHARS:
        raise InvalidField(
            "title", f"a title of {len(title)} characters", f"1 to {MAX_TITLE_CHARS} characters"
        )
    return title


def title_of(text: str) -> str:
    """The first words of a text that has some."""
    words = " ".join(text.split())
    if len(words) <= TITLE_CHARS:
        return words
    cut = words[:TITLE_CHARS]
    at_word = cut.rpartition(" ")[0]
    return (at_word or cut) + "…"


def _check(text: str, field: str) -> None:
    at = text.find("\0")
    if at >= 0:
        raise InvalidField(field, f"NUL at character {at}", "any character but U+0000")
    found = _SURROGATE.search(text)
    if found is not None:
        value = f"lone surrogate U+{ord(found[0]):04X} at character {found.start()}"
        raise InvalidField(field, value, "valid Unicode text")

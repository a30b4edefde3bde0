"""Names of accounts, of API keys, and where a form leads after it."""

from __future__ import annotations

import unicodedata

from app.faults import InvalidField
from sessions.account_records import Name

MAX_NAME_CHARS = 40
NAME_RULE = f"1 to {MAX_NAME_CHARS} characters; capitals make no difference"
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def name_of(text: str) -> Name:
    """The name that a form field holds. Raises InvalidField."""
    shown = " ".join(unicodedata.normalize("NFKC", text).split())
    if not shown:
        raise InvalidField("name", "Choose a name.")
    if len(shown) > MAX_NAME_CHARS:
        raise InvalidField(
            "name", f"This name has {len(shown):,} characters; {MAX_NAME_CHARS} are allowed."
        )
    if any(unicodedata.category(char) in _INVISIBLE for char in shown):
        raise InvalidField("name", "This name has characters that cannot be seen.")
    return Name(shown=shown, key=name_key(shown))


def name_key(text: str) -> str:
    """A name as names are compared: what looks the same to a person who types it is the same."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def local_path(text: str) -> str:
    """A path of this server to go on to; "/" for anything that could lead elsewhere."""
    plain = text.isascii() and text.isprintable() and len(text) <= 500
    if plain and text.startswith("/") and not text.startswith("//") and "\\" not in text:
        return text
    return "/"

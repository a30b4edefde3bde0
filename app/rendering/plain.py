"""What a person typed is shown as typed."""

from __future__ import annotations

from html import escape


def render_plain(text: str) -> str:
    """Return `text` escaped for an element whose style keeps white space (`.plain`).

    NUL, which no HTML parser keeps, becomes U+FFFD.
    """
    return escape(text.replace("\0", "\ufffd"))

"""Code to HTML with Pygments' classes, and the style sheet for both colour schemes.

The sheet is kept as app/static/highlight.css; see `style_sheet`.
"""

from __future__ import annotations

from functools import lru_cache
from html import escape

from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

# Longer code is shown without colours: highlighting is the dearest part of rendering.
MAX_HIGHLIGHTED_CHARS = 32_768
_CLASS_PREFIX = "hl-"
_LIGHT_STYLE, _DARK_STYLE = "xcode", "one-dark"

_formatter = HtmlFormatter(nowrap=True, classprefix=_CLASS_PREFIX)


@lru_cache(maxsize=128)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def highlight_code(code: str, language: str) -> str:
    """Return `code` escaped, in spans with `hl-*` classes when the language is known."""
    lexer = _lexer(language.lower()) if 0 < len(language) <= 32 else None
    if lexer is None or len(code) > MAX_HIGHLIGHTED_CHARS:
        return escape(code)
    return str(highlight(code, lexer, _formatter))


def style_sheet() -> str:
    """Return the CSS of the highlighted code: light, and dark where the system asks for it."""

    def rules(style: str, indent: str) -> str:
        formatter = HtmlFormatter(style=style, classprefix=_CLASS_PREFIX)
        # The stubs leave this method untyped.
        lines: list[str] = formatter.get_token_style_defs(".code")  # type: ignore[no-untyped-call]
        # The page's own colours are the ground and the plain text.
        kept = [line for line in lines if "hl-w " not in line and "hl-err " not in line]
        return "\n".join(indent + line for line in sorted(kept))

    return (
        "/* Written by app.rendering.highlighting.style_sheet. */\n"
        f"{rules(_LIGHT_STYLE, '')}\n"
        "@media (prefers-color-scheme: dark) {\n"
        f"{rules(_DARK_STYLE, '  ')}\n"
        "}\n"
    )

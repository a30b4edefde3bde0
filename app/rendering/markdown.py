"""CommonMark with tables and strikethrough, one sanitised piece of HTML per top-level block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from app.rendering.highlighting import highlight_code
from app.rendering.sanitiser import is_allowed_url, sanitise

# Part of every cache key of rendered HTML: raise it when the output for any text changes.
RENDERER_VERSION = "1"


class _Renderer(RendererHTML):
    """Code with classes, images as their text, alignment as a class (no inline style)."""

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        words = tokens[idx].info.split(maxsplit=1)
        return _code_block(tokens[idx].content, words[0] if words else "")

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        return _code_block(tokens[idx].content, "")

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        alt = self.renderInlineAsText(tokens[idx].children, options, env)
        text = alt or str(tokens[idx].attrGet("src") or "")
        return f'<span class="image-text">{escape(text)}</span>'

    def table_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        return '<div class="table"><table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        return "</table></div>\n"

    def th_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        return _cell(tokens[idx])

    def td_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        return _cell(tokens[idx])


def _code_block(code: str, language: str) -> str:
    label = f'<span class="code-language">{escape(language[:32])}</span>' if language else ""
    html = highlight_code(code, language)
    return f'<div class="code">{label}<pre><code>{html}</code></pre></div>\n'


def _cell(token: Token) -> str:
    style = str(token.attrGet("style") or "")
    side = style.removeprefix("text-align:")
    return f'<{token.tag} class="align-{side}">' if side else f"<{token.tag}>"


def _parser() -> MarkdownIt:
    md = MarkdownIt(
        "commonmark",
        {"html": False, "typographer": False, "maxNesting": 20},
        renderer_cls=_Renderer,
    )
    md.enable(["table", "strikethrough"])
    # A reference defined later would change blocks that were already sent.
    md.disable(["reference", "html_block", "html_inline"])
    # The parser documents replacing this method as the way to set a link policy.
    md.validateLink = is_allowed_url  # type: ignore[method-assign]
    return md


_md = _parser()


def normalise(text: str) -> str:
    """Return `text` with LF line ends and U+FFFD for NUL, as CommonMark reads it."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")


def parse_blocks(text: str) -> Iterator[tuple[int, list[Token]]]:
    """Yield (first line, tokens) of each top-level block of a normalised text."""
    tokens = _md.parse(text)
    start = 0
    for end, token in enumerate(tokens, 1):
        if token.level == 0 and token.nesting <= 0:
            first_line = tokens[start].map
            assert first_line is not None
            yield first_line[0], tokens[start:end]
            start = end


def render_tokens(tokens: list[Token]) -> str:
    """Return the safe HTML of one block's tokens."""
    return sanitise(_md.renderer.render(tokens, _md.options, {}))


def render_blocks(text: str) -> tuple[str, ...]:
    """Return the safe HTML of each top-level block of a whole text."""
    return tuple(render_tokens(tokens) for _, tokens in parse_blocks(normalise(text)))


def render_markdown(text: str) -> str:
    """Return the safe HTML of a whole text: the concatenation of `render_blocks`."""
    return "".join(render_blocks(text))

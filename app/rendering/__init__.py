"""Text to safe HTML: markdown, highlighted code, an allow-list sanitiser, block by block."""

from app.rendering.blocks import BlockRenderer, BlockUpdate
from app.rendering.finished import FinishedHtml, key_of
from app.rendering.markdown import RENDERER_VERSION, render_blocks, render_markdown
from app.rendering.plain import render_plain

__all__ = [
    "RENDERER_VERSION",
    "BlockRenderer",
    "BlockUpdate",
    "FinishedHtml",
    "key_of",
    "render_blocks",
    "render_markdown",
    "render_plain",
]

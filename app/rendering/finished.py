"""HTML of finished texts, kept so that a page of old messages costs no rendering."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from app.rendering.markdown import RENDERER_VERSION, render_markdown


class FinishedHtml:
    """Owns a bounded cache of rendered texts, least recently used out first; event loop only.

    The key is the renderer's version with the text's digest, so nothing stale can come back.
    """

    def __init__(self, max_bytes: int = 32 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._html: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._html)

    def html(self, text: str) -> str:
        """Return `render_markdown(text)`, from the cache where it is there."""
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        key = (RENDERER_VERSION, digest)
        cached = self._html.get(key)
        if cached is not None:
            self._html.move_to_end(key)
            return cached
        html = render_markdown(text)
        self._html[key] = html
        self._num_bytes += len(html.encode())
        while self._num_bytes > self._max_bytes:
            _, oldest = self._html.popitem(last=False)
            self._num_bytes -= len(oldest.encode())
        return html

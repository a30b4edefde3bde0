"""HTML of finished texts, kept so that a page of old messages costs no rendering."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from app.rendering.markdown import RENDERER_VERSION, render_markdown


def key_of(text: str) -> str:
    """What names the HTML of a text: the renderer's version with the text's digest."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
    return f"{RENDERER_VERSION} {digest.hexdigest()}"


class FinishedHtml:
    """Owns a bounded cache of rendered texts, least recently used out first; event loop only.

    By `key_of` the text, so nothing stale can come back.
    """

    def __init__(self, max_bytes: int = 32 * 1024 * 1024) -> None:
        self.num_rendered = 0  # texts so far that were not in the cache
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._html: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._html)

    def __contains__(self, key: str) -> bool:
        return key in self._html

    def html(self, text: str) -> str:
        """Return `render_markdown(text)`, from the cache where it is there."""
        key = key_of(text)
        cached = self._html.get(key)
        if cached is not None:
            self._html.move_to_end(key)
            return cached
        html = render_markdown(text)
        self.num_rendered += 1
        self.put(key, html)
        return html

    def put(self, key: str, html: str) -> None:
        """Keep the HTML of a text that was rendered before."""
        if key in self._html:
            return
        self._html[key] = html
        self._num_bytes += len(html.encode())
        while self._num_bytes > self._max_bytes:
            _, oldest = self._html.popitem(last=False)
            self._num_bytes -= len(oldest.encode())
